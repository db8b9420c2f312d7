// fake_rank rank --config-fd N: see README.md.
#include <exception>
#include <filesystem>
#include <string_view>

#include "common/error.h"
#include "common/file.h"
#include "common/log.h"
#include "common/strings.h"
#include "tests/tools/fake_rank/fake_rank.h"

namespace {

int run(int argc, char** argv) {
  using namespace glm53;
  if (argc != 4 || std::string_view(argv[1]) != "rank" || std::string_view(argv[2]) != "--config-fd") {
    throw Error(Code::usage, "expected: fake_rank rank --config-fd N");
  }
  const auto fd = parse_int(argv[3]);
  if (!fd || *fd < 0 || *fd > 1 << 20) throw Error(Code::usage, cat("'", argv[3], "' is no descriptor"));
  auto config = parse_rank_config(read_all(UniqueFd(static_cast<int>(*fd)).get()));
  log::init(cat("rank", config.rank), log::Level::info);
  log::info(cat("fake rank ", config.rank, " of ", config.size, ", generation ", config.generation));
  const auto folder = std::filesystem::path(config.admin_socket).parent_path();
  auto rules = fake::load_rules((folder / "fake_rank.json").string());
  return fake::FakeRank(std::move(config), std::move(rules)).run();
}

}  // namespace

int main(int argc, char** argv) {
  glm53::Notifier notifier;
  try {
    return run(argc, argv);
  } catch (const glm53::Error& e) {
    notifier.error(e.line());
    glm53::log::error(e.line());
    return glm53::rank_exit(e.code());
  } catch (const std::exception& e) {
    notifier.error(e.what());
    glm53::log::error(e.what());
    return glm53::rank_exit(glm53::Code::internal);
  }
}
