// The chat template of GLM-5.3 (revision of 2026-09-04), natively: no template engine, the rules are the code.
#pragma once

#include <string>
#include <vector>

#include "engine/text/chat_messages.h"

namespace glm53::text {

/// The prompt as pieces, markup apart from what the client wrote, ready for Tokenizer::encode. Images, videos and audio
/// stand as placeholders.
std::vector<TextPiece> render_chat(const std::vector<Message>& messages, const std::vector<Tool>& tools,
                                   const ChatOptions& options);
/// The concatenation.
std::string flatten(const std::vector<TextPiece>& pieces);

}  // namespace glm53::text
