// Downloads a repository as the tests' own process, to be killed: CACHE JOURNAL ENDPOINT REPO.
#include <iostream>

#include "agent/hub/downloader.h"

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    glm53::hub::Settings settings;
    settings.cache = argv[1];
    settings.journal_dir = argv[2];
    settings.endpoint = argv[3];
    settings.segment_bytes = 64 << 10;
    settings.ranges_above = 1 << 20;
    settings.disk_reserve = 0;
    settings.parallel_files = settings.parallel_ranges = 2;
    settings.journal_period = glm53::hub::Millis(50);
    glm53::hub::DownloadRequest request;
    request.repo = argv[4];
    glm53::hub::Downloader(settings).run(request);
    return 0;
  } catch (const glm53::Error& e) {
    std::cerr << e.line() << "\n";
  } catch (const std::exception& e) {
    std::cerr << e.what() << "\n";
  }
  return 1;
}
