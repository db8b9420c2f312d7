#include "agent/image/manifest.h"

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::image {
namespace {

const std::string kA = "sha256:" + std::string(64, 'a');

TEST_CASE("manifest: references") {
  const Reference r = parse_reference("ghcr.io/org/na-me:v1@" + kA);
  CHECK(r.registry == "ghcr.io");
  CHECK(r.repository == "org/na-me");
  CHECK(r.tag.empty());
  CHECK(r.digest == kA);
  CHECK(r.scheme() == "https");
  CHECK(parse_reference("localhost:5000/x").tag == "latest");
  CHECK(parse_reference("localhost:5000/x").scheme() == "http");
  CHECK(parse_reference("127.0.0.1:5000/x/y:t").tag == "t");
  for (const char* bad : {"", "x", "x/y", "ghcr.io/", "ghcr.io/X", "ghcr.io/a/../b", "ghcr.io/a//b", "ghcr.io/a:",
                          "ghcr.io/a@sha256:abc", "ghcr.io/a@md5:x", "-o.x/a", "ghcr.io/a:-x", "a b.c/x"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(parse_reference(bad), Error);
  }
}

TEST_CASE("manifest: images, indexes and what is neither") {
  const std::string d = cat(R"({"mediaType":"m","digest":")", kA, R"(","size":5})");
  const auto image = [&](const std::string& more) {
    return cat(R"({"schemaVersion":2,"config":)", d, R"(,"layers":[)", d, "]", more, "}");
  };
  CHECK(parse_document(image(""), "x").manifest->layers.size() == 1);
  const std::string index = cat(R"({"schemaVersion":2,"manifests":[{"digest":")", kA,
                                R"(","size":5,"platform":{"os":"linux","architecture":"arm64"}}]})");
  const Document list = parse_document(index, "x");
  CHECK(choose(list.index, {"linux", "arm64"}, "x").descriptor.digest == kA);
  CHECK_THROWS_WITH_AS(choose(list.index, {"linux", "amd64"}, "x"), doctest::Contains("linux/arm64"), Error);
  for (const std::string& bad :
       {std::string("[]"), std::string("{}"), std::string("{\"schemaVersion\":2}"), image(R"(,"manifests":[])"),
        image(R"(,"mediaType":"application/vnd.oci.image.index.v1+json")"),
        cat(R"({"schemaVersion":1,"config":)", d, R"(,"layers":[)", d, "]}"),
        cat(R"({"schemaVersion":2,"config":)", d, R"(,"layers":[]})"),
        std::string(R"({"schemaVersion":2,"config":{"digest":"sha256:x","size":1},"layers":[]})"),
        cat(R"({"schemaVersion":2,"config":{"digest":")", kA, R"(","size":-1},"layers":[)", d, "]}"),
        std::string(5 << 20, ' ')}) {
    CHECK_THROWS_WITH_AS(parse_document(bad, "x"), doctest::Contains("E651"), Error);
  }
}

TEST_CASE("manifest: configurations and layer types") {
  const std::string good = cat(R"({"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":[")", kA,
                               R"("]},"config":{"Labels":{"org.opencontainers.image.version":"1.2"}}})");
  CHECK(parse_config(good, 1, "x").version == "1.2");
  CHECK_THROWS_AS(parse_config(good, 2, "x"), Error);
  CHECK_THROWS_AS(parse_config("{}", 1, "x"), Error);
  CHECK(packing_of("application/vnd.oci.image.layer.v1.tar+zstd") == Packing::zstd);
  CHECK(packing_of("application/vnd.oci.image.layer.v1.tar") == Packing::tar);
  CHECK_THROWS_AS(packing_of("application/octet-stream"), Error);
}

}  // namespace
}  // namespace glm53::image
