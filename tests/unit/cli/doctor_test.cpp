// What doctor prints, and its exit code.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "common/error.h"

using namespace glm53;
using namespace glm53::cli;
using Json = nlohmann::ordered_json;

namespace {

Json check(const char* verdict, const char* remedy = "") {
  return {{"name", "ports"}, {"code", "E214"}, {"verdict", verdict}, {"measured", "port 1"}, {"remedy", remedy}};
}
Json report(const Json& checks) {
  Json node{{"node", "head"}};
  node["checks"] = checks;
  Json out;
  out["nodes"] = Json::array({node});
  return out;
}

}  // namespace

TEST_CASE("doctor prints every check with its verdict, and the remedy below") {
  const std::string page =
      render_doctor(report(Json::array({check("pass"), check("fail", "stop it"), check("skip")})), false);
  CHECK(page ==
        "head\n  pass  E214  ports  port 1\n  fail  E214  ports  port 1\n        try: stop it\n"
        "  skip  E214  ports  port 1\n1 failed, 0 warnings, 1 passed, 1 skipped\n");
}

TEST_CASE("doctor exits 3 when any check failed, and only then") {
  CHECK(doctor_exit(report(Json::array({check("pass"), check("warn", "x"), check("skip")}))) == 0);
  CHECK(doctor_exit(report(Json::array({check("pass"), check("fail", "x")}))) == 3);
  CHECK(doctor_exit(report(Json::array({check("splendid")}))) == 3);
}

TEST_CASE("an answer that is no report is an error") {
  for (const Json& bad : {Json::object(), Json{{"nodes", 1}}, Json{{"nodes", Json::array({Json::object()})}}}) {
    CHECK_THROWS_AS(doctor_exit(bad), Error);
    CHECK_THROWS_AS(render_doctor(bad, false), Error);
  }
}
