// JSON from strangers: UTF-8, bounded depth, no duplicate keys, no NaN, no number beyond a double.
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
  // Of a text as well, "inf" or "-inf": Python's models write them so.
  double number() const;
  bool infinite() const { return kind_ == text && (string() == "inf" || string() == "-inf"); }
  const std::string& string() const { return body_->text; }
  // Elements of an array, or values of an object, whose names are keys().
  const std::vector<Json>& items() const { return body_->items; }
  const std::vector<std::string>& keys() const { return body_->keys; }
  // The value of a key, or null where there is none.
  const Json* find(std::string_view key) const;
  // The value of a key that has been checked to be there.
  const Json& operator[](std::string_view key) const { return *find(key); }
  // As values; 1 and 1.0 are equal.
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

// Throws std::string: what is wrong, and at which byte. `most`: values, each of which takes up to
// fifty times the bytes that it has in the text.
Json parse_json(std::string_view text, size_t most = 1 << 22);

// As Python's json.dumps writes them: texts in ASCII, numbers with the fewest digits that read
// back.
void write_text(std::string& out, std::string_view value);
void write_number(std::string& out, double value);
void write_json(std::string& out, const Json& value);

// Bytes of the character at `at`, which `code` gets; 0 where it is no UTF-8.
size_t character(std::string_view text, size_t at, uint32_t* code);
void append_utf8(std::string& out, uint32_t code);

// Characters of UTF-8 that has been checked.
size_t characters(std::string_view text);

}  // namespace edge_lib
