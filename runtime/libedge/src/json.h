// A parser for untrusted JSON: UTF-8, bounded depth, no duplicate keys, no NaN, no numbers beyond a
// double.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace edge_lib {

class Json {
 public:
  enum Kind : uint8_t { null, boolean, integer, real, text, array, object };

  Json() : kind_(null), whole_(0) {}
  Json(Json&&) = default;
  Json& operator=(Json&&) = default;
  static Json of(std::string value);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool truth() const { return whole_ != 0; }
  int64_t whole() const { return whole_; }
  // The value of a number, or of the text "inf" or "-inf", which Python's models write.
  double number() const;
  bool infinite() const { return kind_ == text && (string() == "inf" || string() == "-inf"); }
  const std::string& string() const { return body_->text; }
  // Elements of an array, or values of an object, parallel to keys().
  const std::vector<Json>& items() const { return body_->items; }
  const std::vector<std::string>& keys() const { return body_->keys; }
  // Returns the value of a key, or null without one.
  const Json* find(std::string_view key) const;
  // Returns the value of a key that is known to exist.
  const Json& operator[](std::string_view key) const { return *find(key); }
  // Compares values: 1 equals 1.0.
  bool operator==(const Json& other) const;

 private:
  friend class Parser;
  struct Body {
    std::string text;
    std::vector<Json> items;
    std::vector<std::string> keys;
  };
  Kind kind_;
  union {
    int64_t whole_;
    double number_;
  };
  std::unique_ptr<Body> body_;
};

// Throws std::string, what is wrong and at which byte. `most`: maximum number of values, each of
// which takes up to fifty times its bytes in the text.
Json parse_json(std::string_view text, size_t most = 1 << 22);

// Write JSON as Python's json.dumps does: ASCII text, numbers with the fewest digits that read back
// exactly.
void write_text(std::string& out, std::string_view value);
void write_number(std::string& out, double value);
void write_json(std::string& out, const Json& value);

// Returns the length in bytes of the character at `at` and stores it in `code`; 0 if it is not
// UTF-8.
size_t character(std::string_view text, size_t at, uint32_t* code);
void append_utf8(std::string& out, uint32_t code);

// Number of characters of valid UTF-8.
size_t characters(std::string_view text);

}  // namespace edge_lib
