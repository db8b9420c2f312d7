#include "cli/recipe.h"

#include <algorithm>
#include <cctype>
#include <set>

#include <nlohmann/json.hpp>

#include "common/config.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAdminPort = ":8890";

Error wrong(const std::string& file, int line, const std::string& what) {
  return {Code::config, cat(file, ":", line, ": ", what),
          "lines are NAME=value, NAME=\"value\" or NAME='value'; nothing is expanded or run"};
}

bool is_name(std::string_view text) {
  const auto good = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
  return !text.empty() && std::isdigit(static_cast<unsigned char>(text.front())) == 0 &&
         std::all_of(text.begin(), text.end(), good);
}

/// The value as a shell without expansions reads it.
std::string value_of(std::string_view text, const std::string& file, int line) {
  std::string out;
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool expands = c == '$' || c == '`';
    if (expands && quote != '\'') throw wrong(file, line, cat("'", c, "' would be expanded by a shell"));
    if (quote != 0) {
      if (c == quote) {
        quote = 0;
      } else if (c == '\\' && quote == '"' && i + 1 < text.size() && (text[i + 1] == '"' || text[i + 1] == '\\')) {
        out += text[++i];
      } else {
        out += c;
      }
      continue;
    }
    if (c == '\'' || c == '"') {
      quote = c;
    } else if (c == ' ' || c == '\t') {
      const std::string_view rest = trim(text.substr(i));
      if (rest.empty() || rest.front() == '#') return out;
      throw wrong(file, line, "a value with spaces needs quotes");
    } else if (std::string_view(";&|<>()\\").find(c) != std::string_view::npos) {
      throw wrong(file, line, cat("'", c, "' means something to a shell"));
    } else {
      out += c;
    }
  }
  if (quote != 0) throw wrong(file, line, cat("the quote ", quote, " is not closed"));
  return out;
}

/// What a variable sets; nothing when it sets nothing.
std::optional<std::string> setting_of(const Knob& knob, const std::string& value) {
  if (knob.key.empty()) return std::nullopt;
  const std::string converted = knob.convert == nullptr ? value : knob.convert(value);
  if (converted.empty()) return std::nullopt;
  return converted;
}

const ConfigKey& config_key(std::string_view name) {
  const auto keys = config_keys();
  const auto it = std::find_if(keys.begin(), keys.end(), [&](const ConfigKey& k) { return k.name == name; });
  if (it == keys.end()) throw Error(Code::internal, cat("there is no key ", name));
  return *it;
}

std::string toml_line(const Config& config, std::string_view key) {
  const Json all = config.to_json();
  const Json& value = all.at(std::string(key));
  if (config_key(key).type == KeyType::list) {
    std::vector<std::string> parts;
    for (const Json& part : value) parts.push_back(part.dump());
    return cat(key, " = [", join(parts, ", "), "]");
  }
  return cat(key, " = ", value.dump());
}

class Importer {
 public:
  Importer(std::string file, std::string role) : file_(std::move(file)), role_(std::move(role)) {
    set("node.role", role_, 0);
  }
  void take(const EnvLine& line) {
    const Knob* const knob = find_knob(line.name);
    if (knob == nullptr) {
      std::vector<std::string> names;
      for (const Knob& k : knobs()) names.emplace_back(k.name);
      const auto near = nearest(line.name, names);
      note(line,
           near ? cat("is no variable of the recipe; did you mean ", *near, "?") : "is no variable of the recipe");
      return;
    }
    if (line.name == "HEAD_IP" && role_ == "head") set("admin.listen", line.value + kAdminPort, line.line);
    if (line.name == "WORKER_IP")
      set(role_ == "head" ? "worker.admin" : "admin.listen", line.value + kAdminPort, line.line);
    std::optional<std::string> value;
    try {
      value = setting_of(*knob, line.value);
    } catch (const Error& e) {
      throw Error(Code::config, cat(file_, ":", line.line, ": ", line.name, ": ", e.what()), e.remedy());
    }
    if (!value) {
      note(line, knob->key.empty() ? std::string(knob->note) : "is empty: the default stays");
      return;
    }
    const bool other_node = role_ == "worker" && config_key(knob->key).scope == KeyScope::cluster;
    if (other_node) return;  // the head's file says it
    if (role_ == "worker" && line.name == "HF_HOME") return note(line, "is the head's; set hub.home for this machine");
    set(knob->key, *value, line.line);
    if (line.name == "MODEL_FALLBACK" || line.name == "GPU_MEM_UTIL") note(line, std::string(knob->note));
  }
  Import finish() {
    Import out;
    out.toml = cat("# Made from ", file_, " by glm53ctl config import. Every key: glm53ctl config example.\n");
    for (const ConfigKey& key : config_keys()) {
      if (set_.contains(key.name)) out.toml += toml_line(config_, key.name) + "\n";
    }
    (void)Config::parse(out.toml, "the result");
    out.notes = std::move(notes_);
    return out;
  }

 private:
  void set(std::string_view key, const std::string& value, int line) {
    try {
      config_.set(key, value, cat(file_, ":", line));
    } catch (const Error& e) {
      throw Error(Code::config, cat(file_, ":", line, ": ", e.what()), e.remedy());
    }
    set_.emplace(key);
  }
  void note(const EnvLine& line, const std::string& text) {
    notes_.push_back(cat(file_, ":", line.line, ": ", line.name, ": ", text));
  }
  const std::string file_, role_;
  Config config_;
  std::set<std::string, std::less<>> set_;
  std::vector<std::string> notes_;
};

}  // namespace

std::vector<EnvLine> parse_env(std::string_view text, const std::string& file) {
  if (!valid_utf8(text) || text.find('\0') != std::string_view::npos)
    throw Error(Code::config, cat(file, " is no text"), "name the recipe's .env");
  std::vector<EnvLine> out;
  int number = 0;
  for (const std::string& raw : split(text, '\n')) {
    ++number;
    std::string_view line = trim(raw);
    if (line.empty() || line.front() == '#') continue;
    if (line.starts_with("export ")) line = trim(line.substr(7));
    const size_t equals = line.find('=');
    if (equals == std::string_view::npos || !is_name(line.substr(0, equals)))
      throw wrong(file, number, "this is no NAME=value");
    out.push_back({std::string(line.substr(0, equals)), value_of(line.substr(equals + 1), file, number), number});
  }
  return out;
}

Import import_recipe(std::string_view text, const std::string& file, const std::string& role) {
  Importer importer(file, role);
  std::map<std::string, EnvLine> last;  // a shell keeps the last one
  std::vector<std::string> order;
  for (EnvLine& line : parse_env(text, file)) {
    if (!last.contains(line.name)) order.push_back(line.name);
    const std::string name = line.name;
    last[name] = std::move(line);
  }
  for (const std::string& name : order) importer.take(last.at(name));
  return importer.finish();
}

std::vector<Override> recipe_overrides(const std::function<std::optional<std::string>(const char*)>& environment) {
  std::vector<Override> out;
  for (const Knob& knob : knobs()) {
    if (knob.key.empty() || config_key(knob.key).scope == KeyScope::node) continue;
    const auto value = environment(std::string(knob.name).c_str());
    if (!value) continue;
    try {
      if (const auto setting = setting_of(knob, *value))
        out.push_back({cat(knob.key, "=", *setting), std::string(knob.name)});
    } catch (const Error& e) {
      throw Error(Code::usage, cat("environment variable ", knob.name, ": ", e.what()), "unset it, or use --no-env");
    }
  }
  return out;
}

std::string recipe_page() {
  std::string page =
      "# From the recipe\n\n"
      "For those who ran GLM-5.3-Flash with the vLLM recipe (`start.sh` and its `.env`).\n\n"
      "```\n"
      "glm53ctl config import .env > config.toml                  # for the head\n"
      "glm53ctl config import .env --role worker > worker.toml    # for the worker\n"
      "```\n\n"
      "The file is read, never run: a value that a shell would expand is refused with its line. Notes about what is "
      "left out go to "
      "standard error.\nSecrets are never copied: write them to files of mode 0600 and name those. Afterwards "
      "`glm53ctl config "
      "check` and `glm53ctl doctor`.\n\n"
      "`glm53ctl start` and `restart` also take the variables that have a key of the cluster here from their own "
      "environment, as the recipe "
      "did\n(`PORT=9000 glm53ctl restart`): one line says so for each, `--set` wins over them, `--no-env` ignores "
      "them. The agents "
      "never look at them.\n\n"
      "| recipe | here |\n|---|---|\n"
      "| `./start.sh` | `glm53ctl start` |\n| `./start.sh download` | `glm53ctl download` |\n"
      "| `./start.sh stop`, `restart`, `status` | `glm53ctl stop`, `restart`, `status` |\n"
      "| `./start.sh logs [worker]` | `glm53ctl logs [head\\|worker] -f` |\n"
      "| `scripts/spark_doctor.sh` | `glm53ctl doctor` |\n"
      "| `examples/systemd/*` | `systemctl enable --now glm53-agent` |\n\n"
      "## Every variable\n\n"
      "Made of the table in `cli/recipe_table.cpp`: `GLM53_UPDATE=1 build/…/tests/unit_cli -tc=\"recipe: docs*\"` "
      "writes it.\n\n"
      "| variable | key | remark |\n|---|---|---|\n";
  for (const Knob& knob : knobs()) {
    page += cat("| `", knob.name, "` | ", knob.key.empty() ? std::string("none") : cat("`", knob.key, "`"), " | ",
                knob.note, " |\n");
  }
  return page;
}

}  // namespace glm53::cli
