#include "json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace edge_lib {

constexpr int DEPTH = 64;

size_t character(std::string_view s, size_t at, uint32_t* code) {
  auto byte = [&](size_t i) { return i < s.size() ? uint8_t(s[i]) : 0; };
  uint8_t first = byte(at);
  size_t length = first < 0x80       ? 1
                  : first >> 5 == 6  ? 2
                  : first >> 4 == 14 ? 3
                  : first >> 3 == 30 ? 4
                                     : 0;
  uint32_t value = length == 1 ? first : first & (0xff >> (length + 1));
  for (size_t i = 1; i < length; i++) {
    if (byte(at + i) >> 6 != 2) return 0;
    value = value << 6 | (byte(at + i) & 0x3f);
  }
  static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  if (length == 0 || value < least[length] || value > 0x10ffff) return 0;
  if (value >= 0xd800 && value < 0xe000) return 0;
  *code = value;
  return length;
}

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80)
    out += char(code);
  else if (code < 0x800) {
    out += char(0xc0 | code >> 6);
    out += char(0x80 | (code & 0x3f));
  } else {
    if (code < 0x10000)
      out += char(0xe0 | code >> 12);
    else {
      out += char(0xf0 | code >> 18);
      out += char(0x80 | (code >> 12 & 0x3f));
    }
    out += char(0x80 | (code >> 6 & 0x3f));
    out += char(0x80 | (code & 0x3f));
  }
}

Json Json::of(std::string value) {
  Json made;
  made.kind_ = text;
  made.body_.reset(new Body);
  made.body_->text = std::move(value);
  return made;
}

double Json::number() const {
  if (kind_ == text) return string()[0] == '-' ? -INFINITY : INFINITY;
  return kind_ == integer ? double(whole_) : number_;
}

const Json* Json::find(std::string_view key) const {
  for (size_t i = 0; kind_ == object && i < body_->keys.size(); i++)
    if (body_->keys[i] == key) return &body_->items[i];
  return nullptr;
}

bool Json::operator==(const Json& other) const {
  bool numbers =
      (kind_ == integer || kind_ == real) && (other.kind_ == integer || other.kind_ == real);
  if (numbers) return number() == other.number();
  if (kind_ != other.kind_) return false;
  switch (kind_) {
    case null:
      return true;
    case boolean:
      return whole_ == other.whole_;
    case text:
      return string() == other.string();
    case array:
      return items().size() == other.items().size() &&
             std::equal(items().begin(), items().end(), other.items().begin());
    default:
      if (keys().size() != other.keys().size()) return false;
      for (size_t i = 0; i < keys().size(); i++) {
        const Json* theirs = other.find(keys()[i]);
        if (!theirs || !(items()[i] == *theirs)) return false;
      }
      return true;
  }
}

class Parser {
 public:
  Parser(std::string_view text, size_t most) : s_(text), left_(most) {}

  Json document() {
    Json found = value(0);
    space();
    if (at_ < s_.size()) wrong("text after its end");
    return found;
  }

 private:
  [[noreturn]] void wrong(const std::string& what) const {
    throw std::string(what + " at byte " + std::to_string(at_));
  }
  char peek() const { return at_ < s_.size() ? s_[at_] : '\0'; }
  void space() {
    while (at_ < s_.size() && std::strchr(" \t\r\n", s_[at_]) && s_[at_]) at_++;
  }
  bool take(char c) {
    space();
    if (at_ >= s_.size() || s_[at_] != c) return false;
    at_++;
    return true;
  }
  void need(char c) {
    if (!take(c)) wrong(std::string("a ") + c + " is missing");
  }

  Json value(int depth) {
    space();
    if (!left_--) wrong("too many values");
    Json out;
    if (take('{') || take('[')) {
      if (depth == DEPTH) wrong("nested more than " + std::to_string(DEPTH) + " deep");
      out.body_.reset(new Json::Body);
      if (s_[at_ - 1] == '{')
        members(out, depth);
      else
        elements(out, depth);
    } else if (peek() == '"') {
      out = Json::of(string());
    } else if (word("true") || word("false")) {
      out.kind_ = Json::boolean;
      out.whole_ = s_[at_ - 2] == 'u';
    } else if (!word("null")) {
      number(out);
    }
    return out;
  }

  bool word(const char* text) {
    if (s_.compare(at_, std::strlen(text), text) != 0) return false;
    at_ += std::strlen(text);
    return true;
  }

  void elements(Json& out, int depth) {
    out.kind_ = Json::array;
    if (take(']')) return;
    do out.body_->items.push_back(value(depth + 1));
    while (take(','));
    need(']');
  }

  void members(Json& out, int depth) {
    out.kind_ = Json::object;
    if (take('}')) return;
    auto& keys = out.body_->keys;
    do {
      space();
      if (peek() != '"') wrong("a key is missing");
      keys.push_back(string());
      need(':');
      out.body_->items.push_back(value(depth + 1));
    } while (take(','));
    need('}');
    std::vector<const std::string*> sorted;
    for (auto& key : keys) sorted.push_back(&key);
    std::sort(sorted.begin(), sorted.end(), [](auto a, auto b) { return *a < *b; });
    for (size_t i = 1; i < sorted.size(); i++)
      if (*sorted[i] == *sorted[i - 1])
        wrong("key \"" + sorted[i]->substr(0, 60) + "\" appears twice");
  }

  uint32_t hexadecimal() {
    uint32_t code = 0;
    for (int i = 0; i < 4; i++) {
      char c = peek();
      int digit = c >= '0' && c <= '9'                 ? c - '0'
                  : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                       : -1;
      if (digit < 0) wrong("an escape without four hexadecimal digits");
      code = code << 4 | uint32_t(digit);
      at_++;
    }
    return code;
  }

  std::string string() {
    std::string out;
    at_++;
    for (;;) {
      if (at_ >= s_.size()) wrong("an unterminated string");
      uint8_t c = uint8_t(s_[at_]);
      if (c == '"') break;
      if (c < 0x20) wrong("a control character in a string");
      uint32_t code = 0;
      if (c != '\\') {
        size_t length = character(s_, at_, &code);
        if (!length) wrong("not UTF-8");
        out.append(s_, at_, length);
        at_ += length;
        continue;
      }
      at_++;
      char escape = peek();
      at_++;
      const char *known = "\"\\/bfnrt", *place = std::strchr(known, escape);
      if (escape && place) {
        out += "\"\\/\b\f\n\r\t"[place - known];
        continue;
      }
      if (escape != 'u') wrong("an unknown escape");
      code = hexadecimal();
      if (code >= 0xd800 && code < 0xdc00 && word("\\u")) {
        uint32_t low = hexadecimal();
        if (low < 0xdc00 || low >= 0xe000) wrong("half a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
      }
      if (code >= 0xd800 && code < 0xe000) wrong("half a surrogate pair");
      append_utf8(out, code);
    }
    at_++;
    return out;
  }

  bool digits() {
    size_t from = at_;
    while (peek() >= '0' && peek() <= '9') at_++;
    return at_ > from;
  }

  void number(Json& out) {
    size_t from = at_;
    bool whole = true, small = false;
    if (peek() == '-') at_++;
    size_t first = at_;
    if (!digits()) wrong("no value");
    if (s_[first] == '0' && at_ - first > 1) wrong("a number with a leading zero");
    small = s_[first] == '0';
    if (peek() == '.') {
      whole = false;
      at_++;
      if (!digits()) wrong("a number without digits after the point");
    }
    if (peek() == 'e' || peek() == 'E') {
      whole = false;
      at_++;
      small = peek() == '-';
      if (peek() == '-' || peek() == '+') at_++;
      if (!digits()) wrong("a number without digits in its exponent");
    }
    const char *begin = s_.data() + from, *end = s_.data() + at_;
    // not strtod, which depends on the host program's locale
    if (whole) {
      out.kind_ = Json::integer;
      if (std::from_chars(begin, end, out.whole_).ec != std::errc()) wrong("too large a number");
      return;
    }
    double read = 0;
    bool beyond = std::from_chars(begin, end, read).ec != std::errc();
    if (beyond && !small) wrong("too large a number");
    out.kind_ = Json::real;
    out.number_ = beyond ? 0 : read;
  }

  std::string_view s_;
  size_t at_ = 0, left_;
};

Json parse_json(std::string_view text, size_t most) { return Parser(text, most).document(); }

size_t characters(std::string_view text) {
  return size_t(
      std::count_if(text.begin(), text.end(), [](char c) { return uint8_t(c) >> 6 != 2; }));
}

void write_text(std::string& out, std::string_view value) {
  out += '"';
  char digits[16];
  for (size_t at = 0; at < value.size();) {
    uint32_t code = 0;
    size_t length = std::max<size_t>(1, character(value, at, &code));
    at += length;
    const char *known = "\"\\\n\r\t\f\b", *place = code ? std::strchr(known, int(code)) : nullptr;
    if (code < 0x80 && place) {
      out += '\\';
      out += "\"\\nrtfb"[place - known];
    } else if (code >= 0x20 && code < 0x7f) {
      out += char(code);
    } else {
      if (code >= 0x10000) {
        std::snprintf(digits, sizeof digits, "\\u%04x", 0xd800 + ((code - 0x10000) >> 10));
        out += digits;
        code = 0xdc00 + ((code - 0x10000) & 0x3ff);
      }
      std::snprintf(digits, sizeof digits, "\\u%04x", code);
      out += digits;
    }
  }
  out += '"';
}

void write_number(std::string& out, double value) {
  if (std::isinf(value)) {
    out += value < 0 ? "-Infinity" : "Infinity";
    return;
  }
  char text[40];
  auto end = std::to_chars(text, text + sizeof text, value, std::chars_format::scientific).ptr;
  std::string_view made(text, size_t(end - text));
  if (made[0] == '-') out += '-', made.remove_prefix(1);
  size_t e = made.find('e');
  int exponent = std::stoi(std::string(made.substr(e + 1)));
  std::string digits(1, made[0]);
  if (e > 2) digits += made.substr(2, e - 2);
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (digits.size() > 1) out += "." + digits.substr(1);
    std::snprintf(text, sizeof text, "e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
    out += text;
  } else if (exponent < 0) {
    out += "0." + std::string(size_t(-exponent - 1), '0') + digits;
  } else {
    size_t before = size_t(exponent) + 1;
    if (digits.size() <= before) digits.append(before + 1 - digits.size(), '0');
    out += digits.substr(0, before) + "." + digits.substr(before);
  }
}

void write_json(std::string& out, const Json& value) {
  switch (value.kind()) {
    case Json::null:
      out += "null";
      break;
    case Json::boolean:
      out += value.truth() ? "true" : "false";
      break;
    case Json::integer:
      out += std::to_string(value.whole());
      break;
    case Json::real:
      write_number(out, value.number());
      break;
    case Json::text:
      write_text(out, value.string());
      break;
    default: {
      bool object = value.is(Json::object);
      out += object ? '{' : '[';
      for (size_t i = 0; i < value.items().size(); i++) {
        if (i) out += ", ";
        if (object) {
          write_text(out, value.keys()[i]);
          out += ": ";
        }
        write_json(out, value.items()[i]);
      }
      out += object ? '}' : ']';
    }
  }
}

}  // namespace edge_lib
