#include "agent/image/registry.h"

#include <filesystem>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/file.h"
#include "tests/unit/image/fake_registry.h"

namespace glm53::image::test {
namespace {

namespace fs = std::filesystem;

/// A registry, a store and an image whose one layer is not small.
struct Place {
  TempDir dir;
  Store store{StoreOptions{.dir = dir / "store"}};
  FakeRegistry registry;
  Made image = make_image({make_tar({{"glm53-engine", "#!/bin/sh\necho '{\"version\":\"5.1\"}'\n", '0', {}, 0755},
                                     {"data", std::string(200'000, 'd')}})},
                          false);
  std::string layer = image.blobs[0].first;
  std::vector<std::string> said;

  Place() { registry.add(image, "v5"); }
  RegistryOptions options() {
    RegistryOptions o;
    o.retry = {.base = hub::Millis(1), .longest = hub::Millis(5), .give_up_after = hub::Millis(20'000)};
    o.report = [this](const std::string& text) { said.push_back(text); };
    return o;
  }
  std::string pull(const std::string& name, const std::string& credentials = {}) {
    RegistryOptions o = options();
    o.credentials = credentials;
    Registry r(parse_reference(registry.name() + name), o);
    const std::string digest = r.resolve(store);
    r.pull(store, digest);
    return digest;
  }
  std::string error(const std::string& credentials = {}) {
    try {
      pull("@" + image.digest, credentials);
    } catch (const Error& e) {
      return e.what();
    }
    return {};
  }
};

TEST_CASE("registry: a tag becomes a digest; what is there is not asked for again") {
  Place p;
  CHECK(p.pull(":v5") == p.image.digest);
  CHECK(p.store.install(p.image.digest, "").version == "5.1");
  const int64_t sent = p.registry.body_bytes;
  CHECK(p.pull("@" + p.image.digest) == p.image.digest);
  CHECK(p.registry.body_bytes == sent);
  CHECK_THROWS_WITH_AS(p.pull(":v6"), doctest::Contains("E659"), Error);
}

TEST_CASE("registry: a token is fetched with the credentials, and the storage never sees it") {
  Place p;
  p.registry.token = "token-of-the-test";
  p.registry.credentials = "dXNlcjpwYXNz";  // user:pass
  CHECK(p.error("user:pass").empty());
  CHECK(p.registry.tokens == 1);
  CHECK_FALSE(p.registry.leaked);
  for (const std::string& line : p.said) CHECK(line.find("token-of") == std::string::npos);
}

TEST_CASE("registry: wrong credentials, and a registry that refuses whatever it gets") {
  Place p;
  p.registry.token = "t";
  p.registry.credentials = "dXNlcjpwYXNz";
  CHECK(p.error("user:other").find("E658") != std::string::npos);
  p.registry.refuse = -1;
  CHECK(p.error("user:pass").find("E659") != std::string::npos);
  CHECK(p.registry.tokens < 6);
}

TEST_CASE("registry: cut, limited, broken: it goes on at the byte") {
  Place p;
  p.registry.cut = 3;
  p.registry.cut_after = 50'000;
  p.registry.limited = 1;
  p.registry.broken = 2;
  CHECK(p.error().empty());
  CHECK(p.registry.ranges == 3);
  CHECK(p.registry.body_bytes == static_cast<int64_t>(p.image.blobs[0].second.size()));
  CHECK(p.store.install(p.image.digest, "").version == "5.1");
}

TEST_CASE("registry: a server without ranges starts again, still verified") {
  Place p;
  p.registry.cut = 1;
  p.registry.no_range = -1;
  p.registry.redirect = false;
  CHECK(p.error().empty());
  CHECK(read_file(p.store.blob_path(p.layer)) == p.image.blobs[0].second);
}

TEST_CASE("registry: other bytes than the digest names are never kept") {
  Place p;
  p.registry.flip = -1;
  CHECK(p.error().find("E650") != std::string::npos);
  p.registry.flip = 0;
  p.registry.longer = -1;
  CHECK(p.error().find("E650") != std::string::npos);
  CHECK_FALSE(fs::exists(p.store.blob_path(p.layer)));
  p.registry.longer = 0;
  Place q;
  q.registry.set(q.image.digest, q.image.blobs.back().second + " ");
  CHECK(q.error().find("E650") != std::string::npos);
  CHECK_FALSE(fs::exists(q.store.blob_path(q.image.digest)));
}

TEST_CASE("registry: what an earlier run left is used when it is right, and replaced when it is not") {
  Place p;
  const std::string& bytes = p.image.blobs[0].second;
  write_file(p.store.blob_path(p.layer) + ".partial", bytes.substr(0, 150'000));
  CHECK(p.error().empty());
  CHECK(p.registry.body_bytes == static_cast<int64_t>(bytes.size()) - 150'000);
  Place q;
  write_file(q.store.blob_path(q.layer) + ".partial", std::string(150'000, 'x'));
  CHECK(q.error().empty());
  CHECK(read_file(q.store.blob_path(q.layer)) == bytes);
}

TEST_CASE("registry: redirects in circles end") {
  Place p;
  p.registry.loop = -1;
  CHECK(p.error().find("E618") != std::string::npos);
}

TEST_CASE("registry: challenges and who may see the credentials") {
  const Challenge c = parse_challenge(R"(Bearer realm="https://auth.docker.io/token", service="a,b", scope=x:y:pull)");
  CHECK(c.scheme == "bearer");
  CHECK(c.realm == "https://auth.docker.io/token");
  CHECK(c.service == "a,b");
  CHECK(c.scope == "x:y:pull");
  CHECK_THROWS_AS(parse_challenge("Bearer service=x"), Error);
  CHECK_THROWS_AS(parse_challenge(""), Error);
  const auto may = [](const char* registry, const char* realm) {
    return may_have_credentials(registry, hub::parse_url(realm));
  };
  CHECK(may("ghcr.io", "https://ghcr.io/token"));
  CHECK(may("registry-1.docker.io", "https://auth.docker.io/token"));
  CHECK(may("r.eu.example.com", "https://auth.eu.example.com/token"));
  CHECK_FALSE(may("ghcr.io", "http://ghcr.io/token"));
  CHECK_FALSE(may("ghcr.io", "https://evil.io/token"));
  CHECK_FALSE(may("10.0.0.1:5000", "https://20.0.0.1/token"));
}

}  // namespace
}  // namespace glm53::image::test
