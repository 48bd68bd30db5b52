// SentencePiece BPE: reads a `.model` file, the protobuf message of sentencepiece_model.proto, and
// encodes as the library does (sentencepiece/src/bpe_model.cc).
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "merge.h"
#include "split.h"
#include "tokenizer.h"

namespace edge_lib {

namespace {

enum Type { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };
enum Wire { VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5 };
constexpr size_t MAX_PIECE = 4 * 4096;  // bytes
const char SPACE[] = "\xe2\x96\x81";    // a space in pieces

// Iterates over the fields of a protobuf message.
class Message {
 public:
  explicit Message(std::string_view data) : rest_(data) {}
  bool next() {
    if (rest_.empty()) return false;
    uint64_t key = varint();
    field = key >> 3;
    switch (key & 7) {
      case VARINT: number = varint(); break;
      case LENGTH: bytes = take(varint()); break;
      case FIXED64: bytes = take(8); break;
      case FIXED32: bytes = take(4); break;
      default: throw std::string("it is not a SentencePiece model");
    }
    if ((key & 7) != VARINT) number = 0;
    if ((key & 7) == VARINT) bytes = {};
    return true;
  }
  uint64_t field = 0, number = 0;
  std::string_view bytes;

 private:
  std::string_view take(uint64_t size) {
    if (size > rest_.size()) throw std::string("it is cut short");
    std::string_view out = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return out;
  }
  uint64_t varint() {
    uint64_t out = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      uint8_t byte = uint8_t(take(1)[0]);
      out |= uint64_t(byte & 0x7f) << shift;
      if (byte < 0x80) return out;
    }
    throw std::string("it is not a SentencePiece model");
  }
  std::string_view rest_;
};

std::string replaced(std::string_view text, std::string_view what, std::string_view by) {
  std::string out;
  for (size_t at = 0;;) {
    size_t found = text.find(what, at);
    out.append(text, at, found - at);
    if (found == text.npos) return out;
    out += by, at = found + what.size();
  }
}

class SentencePiece : public Tokenizer {
 public:
  SentencePiece(const std::string& data, const Bundle& bundle) {
    std::fill(byte_ids_, byte_ids_ + 256, -1);
    uint64_t kind = 1, escapes = 1;
    bool prefix = true, trims = true, charsmap = false;
    for (Message model(data); model.next();) {
      if (model.field == 1) add(model.bytes);
      if (model.field == 2)
        for (Message trainer(model.bytes); trainer.next();) {
          if (trainer.field == 3) kind = trainer.number;
          if (trainer.field == 24 && trainer.number) throw std::string("spaces after words");
          if (trainer.field == 35) fallback_ = trainer.number;
        }
      if (model.field == 3)
        for (Message normalizer(model.bytes); normalizer.next();) {
          if (normalizer.field == 2) charsmap = !normalizer.bytes.empty();
          if (normalizer.field == 3) prefix = normalizer.number;
          if (normalizer.field == 4) trims = normalizer.number;
          if (normalizer.field == 5) escapes = normalizer.number;
        }
    }
    if (kind != 2) throw std::string(kind == 1 ? "a unigram model" : "not a BPE model");
    if (charsmap) throw std::string("a normalizer with a table of characters");
    if (trims || !escapes) throw std::string("a normalizer that changes spaces");
    own_prefix_ = strips_space_ = prefix;
    all_bytes_ = *std::min_element(byte_ids_, byte_ids_ + 256) >= 0;
    finish(bundle);
  }

 private:
  struct Piece {
    std::string text;
    float score;
    uint64_t type;
  };

  void add(std::string_view data) {
    Piece piece{"", 0, NORMAL};
    for (Message fields(data); fields.next();) {
      if (fields.field == 1) piece.text = std::string(fields.bytes);
      if (fields.field == 2 && fields.bytes.size() == 4)
        std::memcpy(&piece.score, fields.bytes.data(), 4);
      if (fields.field == 3) piece.type = fields.number;
    }
    std::string at = "piece " + std::to_string(pieces_.size());
    if (piece.text.empty() || piece.text.size() > MAX_PIECE)
      throw at + " has a length that is not allowed";
    if (piece.type == UNUSED || piece.type < NORMAL || piece.type > BYTE)
      throw at + " has type " + std::to_string(piece.type);
    uint32_t code;
    for (size_t i = 0, length; i < piece.text.size(); i += length)
      if (!(length = character(piece.text, i, &code))) throw at + " is not UTF-8";
    if (piece.type == BYTE) {
      int value = byte_of(piece.text);
      if (value < 0) throw at + " does not name a byte";
      byte_ids_[value] = int32_t(pieces_.size());
    }
    if (piece.type == UNKNOWN) unknown_ = int32_t(pieces_.size());
    pieces_.push_back(std::move(piece));
  }

  static int byte_of(const std::string& name) {
    static const std::string_view digits = "0123456789ABCDEF";
    if (name.size() != 6 || name.compare(0, 3, "<0x") || name[5] != '>') return -1;
    size_t high = digits.find(name[3]), low = digits.find(name[4]);
    return high < 16 && low < 16 ? int(high << 4 | low) : -1;
  }

  // As in edge/text/spm.py, user-defined symbols with a visible character are special.
  void finish(const Bundle& bundle) {
    std::vector<Special> specials;
    std::vector<Spellings::Entry> symbols;
    for (size_t i = 0; i < pieces_.size(); i++) {
      const Piece& piece = pieces_[i];
      const std::string& text = piece.text;
      bool named = is_named(bundle, int32_t(i)), user = piece.type == USER_DEFINED;
      bool seen = user && !blank(replaced(text, SPACE, " "));
      bool marked = text.size() >= 4 && !text.compare(0, 2, "<|") &&
                    !text.compare(text.size() - 2, 2, "|>");
      bool hidden = named || piece.type == CONTROL || (user && marked);
      bytes_.push_back(hidden                  ? ""
                       : piece.type == UNKNOWN ? "\xef\xbf\xbd"
                       : piece.type == BYTE    ? std::string(1, char(byte_of(text)))
                                               : replaced(text, SPACE, " "));
      if (named || piece.type == CONTROL || seen) specials.push_back({text, int32_t(i), false});
      auto& table = piece.type == NORMAL || (user && !seen && !named) ? known_ : reserved_;
      if (!table.insert({text, int32_t(i)}).second)
        throw "piece " + std::to_string(i) + " appears twice";
      if (&table == &known_ && user) symbols.push_back({text, int32_t(i)});
    }
    set_specials(std::move(specials));
    symbols_ = Spellings(std::move(symbols));
  }

  void plain(std::string_view text, bool first, std::vector<int32_t>& ids) const override {
    std::string given = (first && own_prefix_ ? " " : "") + std::string(text);
    if (!all_bytes_) return stretch(replaced(given, " ", SPACE), ids);
    // the character SPACE itself, as opposed to a space, is encoded as bytes
    for (size_t at = 0;;) {
      size_t found = given.find(SPACE, at);
      stretch(replaced(std::string_view(given).substr(at, found - at), " ", SPACE), ids);
      if (found == given.npos) return;
      for (const char* byte = SPACE; *byte; byte++) ids.push_back(byte_ids_[uint8_t(*byte)]);
      at = found + std::strlen(SPACE);
    }
  }

  void stretch(const std::string& text, std::vector<int32_t>& ids) const {
    std::vector<Symbol> symbols;
    uint32_t code;
    for (size_t at = 0; at < text.size();) {
      const Spellings::Entry* symbol = symbols_.longest(std::string_view(text).substr(at));
      size_t length = symbol ? symbol->text.size() : 0;
      int32_t whole = symbol ? 1 : 0;  // a user-defined symbol, never merged
      if (!length) length = character(text, at, &code);
      if (!length)
        throw Fault{EDGE_ERROR_INPUT, "is not UTF-8 at byte " + std::to_string(at), "", "text"};
      symbols.push_back({at, at + length, whole});
      at += length;
    }
    std::string_view all = text;
    auto order = merged(symbols, [&](const Symbol& left, const Symbol& right, Merge* out) {
      if (left.id || right.id || right.end - left.begin > MAX_PIECE) return false;
      auto found = known_.find(all.substr(left.begin, right.end - left.begin));
      if (found == known_.end()) return false;
      *out = {-double(pieces_[size_t(found->second)].score), 0};
      return true;
    });
    bool unknown = false;  // adjacent unknown characters share one token
    for (int32_t index : order) {
      const Symbol& symbol = symbols[size_t(index)];
      std::string_view part = all.substr(symbol.begin, symbol.end - symbol.begin);
      int32_t id = -1;
      for (const auto* table : {&known_, &reserved_})
        if (auto found = table->find(part); found != table->end()) id = found->second;
      bool known = id >= 0;
      if (known)
        ids.push_back(id);
      else if (fallback_ && all_bytes_)
        for (char byte : part) ids.push_back(byte_ids_[uint8_t(byte)]);
      else if (unknown_ < 0)
        throw Fault{EDGE_ERROR_INPUT,
                    "contains a character that the model's tokenizer cannot encode", "", "text"};
      else if (!unknown)
        ids.push_back(unknown_);
      unknown = !known;
    }
  }

  std::vector<Piece> pieces_;
  std::unordered_map<std::string_view, int32_t> known_, reserved_;
  Spellings symbols_;
  int32_t byte_ids_[256], unknown_ = -1;
  bool fallback_ = false, own_prefix_ = false, all_bytes_ = false;
};

}  // namespace

std::unique_ptr<Tokenizer> read_sentencepiece(const std::string& data, const Bundle& bundle) {
  return std::make_unique<SentencePiece>(data, bundle);
}

}  // namespace edge_lib
