#include "agent/api/journal.h"

#include <nlohmann/json.hpp>

#include "common/json.h"
#include "common/log.h"

namespace glm53::agent {

void Journal::add(const std::string& level, const std::string& kind, const std::string& text,
                  const nlohmann::ordered_json& data, const std::string& operation, uint64_t generation) {
  state::EventRow row;
  row.at = state::now_ms();
  row.level = level;
  row.kind = kind;
  row.operation = operation;
  row.generation = generation;
  row.text = log::redact(text);
  row.data_json = dump(data);
  try {
    events_.add(row);
  } catch (const std::exception& e) {
    log::error(std::string("cannot record an event: ") + e.what());
  }
  log::write(log::parse_level(level), row.text);
  on_event_();
}

void Journal::note(const std::string& level, const std::string& text, const std::string& operation,
                   uint64_t generation) {
  add(level, "log", text,
      {{"at", state::now_ms()}, {"node", "head"}, {"process", "agent"}, {"text", log::redact(text)}}, operation,
      generation);
}

}  // namespace glm53::agent
