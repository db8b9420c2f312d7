#include "engine/text/json_text.h"

#include <array>
#include <charconv>

#include <nlohmann/json.hpp>

namespace glm53::text {

using Json = nlohmann::ordered_json;

std::string python_float(double value) {
  // "-d.ddde-XX" with the fewest digits that read back as the same double.
  std::array<char, 40> buffer;
  const auto [end, status] =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific);
  const std::string_view text(buffer.data(), static_cast<size_t>(end - buffer.data()));
  const size_t e = text.find('e');
  if (status != std::errc() || e == std::string_view::npos) return "0.0";
  int exponent = 0;
  const size_t sign_skip = text[e + 1] == '+' ? 2 : 1;
  std::from_chars(text.data() + e + sign_skip, text.data() + text.size(), exponent);

  std::string out, digits;
  for (const char c : text.substr(0, e)) {
    if (c == '-') {
      out = "-";
    } else if (c != '.') {
      digits += c;
    }
  }
  const auto count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (count > 1) out += "." + digits.substr(1);
    const std::string number = std::to_string(exponent < 0 ? -exponent : exponent);
    return out + (exponent < 0 ? "e-" : "e+") + (number.size() < 2 ? "0" : "") + number;
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (count <= exponent + 1) return out + digits + std::string(static_cast<size_t>(exponent + 1 - count), '0') + ".0";
  return out + digits.substr(0, static_cast<size_t>(exponent) + 1) + "." +
         digits.substr(static_cast<size_t>(exponent) + 1);
}

void append_escaped(std::string& out, std::string_view text) {
  static constexpr std::string_view kHex = "0123456789abcdef";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += "\\u00";
          out += kHex[static_cast<unsigned char>(c) >> 4];
          out += kHex[static_cast<unsigned char>(c) & 15];
        } else {
          out += c;
        }
    }
  }
}

void append_json(std::string& out, const Json& value) {
  switch (value.type()) {
    case Json::value_t::object: {
      out += '{';
      bool first = true;
      for (const auto& [key, member] : value.items()) {
        if (!first) out += ", ";
        first = false;
        out += '"';
        append_escaped(out, key);
        out += "\": ";
        append_json(out, member);
      }
      out += '}';
      break;
    }
    case Json::value_t::array: {
      out += '[';
      bool first = true;
      for (const Json& element : value) {
        if (!first) out += ", ";
        first = false;
        append_json(out, element);
      }
      out += ']';
      break;
    }
    case Json::value_t::string:
      out += '"';
      append_escaped(out, value.get_ref<const std::string&>());
      out += '"';
      break;
    case Json::value_t::boolean:
      out += value.get<bool>() ? "true" : "false";
      break;
    case Json::value_t::number_integer:
      out += std::to_string(value.get<int64_t>());
      break;
    case Json::value_t::number_unsigned:
      out += std::to_string(value.get<uint64_t>());
      break;
    case Json::value_t::number_float:
      out += python_float(value.get<double>());
      break;
    case Json::value_t::binary:
      // common/json.h keeps integers of more than 64 bits as their digits.
      for (const uint8_t digit : value.get_binary()) out += static_cast<char>(digit);
      break;
    case Json::value_t::null:
    case Json::value_t::discarded:
      out += "null";
      break;
  }
}

std::string python_json(const Json& value) {
  std::string out;
  append_json(out, value);
  return out;
}

bool truthy(const Json& value) {
  switch (value.type()) {
    case Json::value_t::boolean:
      return value.get<bool>();
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
    case Json::value_t::number_float:
      return value.get<double>() != 0;
    case Json::value_t::string:
      return !value.get_ref<const std::string&>().empty();
    case Json::value_t::object:
    case Json::value_t::array:
      return !value.empty();
    case Json::value_t::binary:
      return true;
    case Json::value_t::null:
    case Json::value_t::discarded:
      return false;
  }
  return false;
}

}  // namespace glm53::text
