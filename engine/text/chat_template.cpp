#include "engine/text/chat_template.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "engine/text/utf8.h"

namespace glm53::text {

namespace {

using Pieces = std::vector<TextPiece>;

constexpr std::string_view kToolsHead =
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n";
constexpr std::string_view kToolsTail =
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}"
    "</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>";

/// The part [begin, end) of the concatenated pieces.
Pieces slice(const Pieces& pieces, size_t begin, size_t end) {
  Pieces out;
  size_t at = 0;
  for (const TextPiece& piece : pieces) {
    const size_t from = std::max(begin, at), to = std::min(end, at + piece.text.size());
    if (from < to) out.push_back({piece.text.substr(from - at, to - from), piece.markup});
    at += piece.text.size();
  }
  return out;
}

Pieces stripped(const Pieces& pieces) {
  const std::string flat = flatten(pieces);
  const std::string_view kept = strip(flat);
  const auto begin = static_cast<size_t>(kept.data() - flat.data());
  return slice(pieces, begin, begin + kept.size());
}

class Renderer {
 public:
  Renderer(const std::vector<Message>& messages, const std::vector<Tool>& tools, const ChatOptions& options)
      : messages_(messages), tools_(tools), options_(options) {}

  Pieces run() {
    markup("[gMASK]<sop>");
    if (options_.thinking) {
      markup("<|system|>Reasoning Effort: ");
      markup(options_.effort == "low" ? "Low" : options_.effort == "high" ? "High" : "Max");
    }
    if (!tools_.empty()) tools_block();
    for (size_t i = 0; i < messages_.size(); ++i) {
      if (messages_[i].role == Role::user) last_user_ = i;
    }
    for (size_t i = 0; i < messages_.size();) i = message(i);
    if (options_.add_generation_prompt)
      markup(options_.thinking ? "<|assistant|><think>" : "<|assistant|><think></think>");
    return std::move(out_);
  }

 private:
  void add(std::string_view text, bool is_markup) {
    if (text.empty()) return;
    if (!out_.empty() && out_.back().markup == is_markup) {
      out_.back().text += text;
    } else {
      out_.push_back({std::string(text), is_markup});
    }
  }
  void markup(std::string_view text) { add(text, true); }
  void client(std::string_view text) { add(text, false); }
  void add(const Pieces& pieces) {
    for (const TextPiece& piece : pieces) add(piece.text, piece.markup);
  }

  void tool_line(const Tool& tool) {
    client(tool.line);
    markup("\n");
  }

  void tools_block() {
    markup(kToolsHead);
    for (const Tool& tool : tools_) {
      if (!tool.deferred) tool_line(tool);
    }
    markup(kToolsTail);
  }

  static Pieces text_of(const Content& content) {
    Pieces out;
    for (const ContentPart& part : content.parts) {
      switch (part.kind) {
        case PartKind::text:
          out.push_back({part.text, false});
          break;
        case PartKind::image:
          out.push_back({"<|begin_of_image|><|image|><|end_of_image|>", true});
          break;
        case PartKind::video:
          out.push_back({"<|begin_of_video|><|video|><|end_of_video|>", true});
          break;
        case PartKind::audio:
          out.push_back({"<|begin_of_audio|><|end_of_audio|>", true});
          break;
      }
    }
    return out;
  }

  /// Renders what starts at message i; returns the index of the next one.
  size_t message(size_t i) {
    const Message& m = messages_[i];
    switch (m.role) {
      case Role::system:
        markup("<|system|>");
        add(text_of(m.content));
        return i + 1;
      case Role::user:
        markup("<|user|>");
        add(text_of(m.content));
        return i + 1;
      case Role::assistant:
        assistant(i);
        return i + 1;
      case Role::tool:
        return tool_run(i);
    }
    return i + 1;
  }

  void assistant(size_t i) {
    const Message& m = messages_[i];
    Pieces content = text_of(m.content), reasoning;
    bool has_reasoning = m.reasoning.has_value();
    if (has_reasoning) {
      reasoning.push_back({*m.reasoning, false});
    } else {
      has_reasoning = lift_reasoning(content, reasoning);
    }
    content = stripped(content);
    markup("<|assistant|><think>");
    const bool kept = !options_.clear_thinking || !last_user_ || i > *last_user_;
    const bool printed = has_reasoning && kept;
    if (printed) add(reasoning);
    const bool open = options_.continue_final_message && i + 1 == messages_.size() && printed && content.empty() &&
                      m.tool_calls.empty();
    if (!open) markup("</think>");
    add(content);
    for (const ToolCall& call : m.tool_calls) tool_call(call);
  }

  /// Moves a think block written within the content to `reasoning`; false when there is none.
  static bool lift_reasoning(Pieces& content, Pieces& reasoning) {
    static constexpr std::string_view kOpen = "<think>", kClose = "</think>";
    const std::string flat = flatten(content);
    const size_t first_close = flat.find(kClose);
    if (first_close == std::string::npos) return false;
    const size_t open = first_close == 0 ? std::string::npos : flat.substr(0, first_close).rfind(kOpen);
    const size_t begin = open == std::string::npos ? 0 : open + kOpen.size();
    reasoning = slice(content, begin, first_close);
    content = slice(content, flat.rfind(kClose) + kClose.size(), flat.size());
    return true;
  }

  void tool_call(const ToolCall& call) {
    markup("<tool_call>");
    client(call.name);
    for (const ToolArgument& argument : call.arguments) {
      markup("<arg_key>");
      client(argument.key);
      markup("</arg_key><arg_value>");
      client(argument.value);
      markup("</arg_value>");
    }
    markup("</tool_call>");
  }

  size_t tool_run(size_t begin) {
    std::vector<const ToolResult*> results;
    size_t end = begin;
    for (; end < messages_.size() && messages_[end].role == Role::tool; ++end) {
      for (const ToolResult& result : messages_[end].results) results.push_back(&result);
    }
    if (begin > 0 && messages_[begin - 1].role == Role::assistant) reorder(messages_[begin - 1].tool_calls, results);
    markup("<|observation|>");
    for (const ToolResult* result : results) tool_result(result->content);
    return end;
  }

  /// Results follow the calls when ids match without doubt; else they keep their order.
  static void reorder(const std::vector<ToolCall>& calls, std::vector<const ToolResult*>& results) {
    std::set<std::string_view> call_ids, result_ids;
    for (const ToolCall& call : calls) {
      if (!call.id || !call_ids.insert(*call.id).second) return;
    }
    for (const ToolResult* result : results) {
      if (!result->id || !call_ids.contains(*result->id) || !result_ids.insert(*result->id).second) return;
    }
    std::vector<const ToolResult*> ordered;
    for (const ToolCall& call : calls) {
      const auto found =
          std::find_if(results.begin(), results.end(), [&](const ToolResult* r) { return *r->id == *call.id; });
      if (found != results.end()) ordered.push_back(*found);
    }
    results = std::move(ordered);
  }

  void tool_result(const Content& content) {
    markup("<tool_response>");
    if (content.is_reference && !tools_.empty()) {
      markup("<tools>\n");
      for (const std::string& name : content.tool_references) {
        for (const Tool& tool : tools_) {
          if (tool.name == name) tool_line(tool);
        }
      }
      markup("</tools>");
    } else {
      add(text_of(content));
    }
    markup("</tool_response>");
  }

  const std::vector<Message>& messages_;
  const std::vector<Tool>& tools_;
  const ChatOptions& options_;
  std::optional<size_t> last_user_;
  Pieces out_;
};

}  // namespace

std::vector<TextPiece> render_chat(const std::vector<Message>& messages, const std::vector<Tool>& tools,
                                   const ChatOptions& options) {
  return Renderer(messages, tools, options).run();
}

std::string flatten(const std::vector<TextPiece>& pieces) {
  std::string out;
  for (const TextPiece& piece : pieces) out += piece.text;
  return out;
}

}  // namespace glm53::text
