// State files in the format of runtime/statefile.py, with the transcript of Python's Session.save.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "replace.h"
#include "session.h"
#include "sha256.h"

namespace edge_lib {

namespace {

constexpr char MAGIC[] = "EDGESTAT";
constexpr uint32_t VERSION = 1;
constexpr uint64_t MAX_HEADER = 4 << 20, MAX_EXTRA = 64 << 20, SLACK = 8 << 20;
constexpr size_t MAX_VALUES = 1 << 24;  // JSON values, mostly a transcript's tokens
constexpr size_t PREFIX = 32, DIGEST = 32;
const char* const SAFE[] = {"F32", "F16", "I8"};

[[noreturn]] void refuse(const std::string& message, const std::string& file,
                         const std::string& field = "") {
  throw Fault{EDGE_ERROR_STATE, message, file, field};
}

template <class T>
void put(std::string& out, T value) {
  for (size_t i = 0; i < sizeof value; i++) out += char(uint64_t(value) >> 8 * i);
}
uint64_t get(const std::string& data, size_t at, int bytes) {
  uint64_t out = 0;
  for (int i = 0; i < bytes; i++) out |= uint64_t(uint8_t(data[at + size_t(i)])) << 8 * i;
  return out;
}

std::string list(const std::vector<int64_t>& values) {
  std::string out;
  for (int64_t value : values) out += (out.empty() ? "" : ", ") + std::to_string(value);
  return "[" + out + "]";
}

std::string text(const std::string& value) {
  std::string out;
  write_text(out, value);
  return out;
}

// A tensor of a saved state, and its place in the payload's data.
struct SavedTensor {
  std::vector<int64_t> shape;
  DType type;
  int64_t begin, end;
};

}  // namespace

// Reads and writes a session's files. A friend of Session.
class StateFile {
 public:
  StateFile(Session& session, const std::string& path) : s_(session), path_(path) {}

  void save() {
    s_.needs_choice("save");
    bool applied = s_.ledger_.count() > 0;
    if (applied) s_.apply();
    bool whole = !s_.layout_.looks_back;
    std::string header = described(s_.ledger_.position, whole), data, payload, extra = s_.extra_;
    int slot = applied ? s_.ledger_.spare() : s_.ledger_.source();
    for (const Tensor& tensor : s_.layout_.recurrent)
      data.append(s_.slot(tensor, slot), size_t(tensor.slot));
    size_t states = data.size();
    auto places = placed(s_.ledger_.position, whole);
    data.resize(states + size_t(s_.layout_.copy_bytes(s_.ledger_.position)));
    s_.copy_rows(data.data() + states);
    std::string named = "{";
    for (const auto& [name, tensor] : places) {
      if (!finite(data.data() + tensor.begin, tensor.end - tensor.begin, tensor.type))
        refuse("the state is not finite and is not saved", path_, name);
      named += (named.size() > 1 ? ", " : "") + text(name) + ": {\"dtype\": \"" +
               SAFE[int(tensor.type)] + "\", \"shape\": " + list(tensor.shape) +
               ", \"data_offsets\": " + list({tensor.begin, tensor.end}) + "}";
    }
    named += "}";
    named.append((8 - named.size() % 8) % 8, ' ');  // data is aligned to 8 bytes
    put(payload, uint64_t(named.size()));
    payload += named + data;
    if (int64_t(s_.tokens_.size()) == s_.ledger_.position) extra = told();
    if (extra.empty()) extra = "{}";
    if (extra.size() > MAX_EXTRA)
      refuse("cannot be saved: the list of tokens is too long", path_, "extra");
    std::string prefix = MAGIC;
    put(prefix, VERSION);
    put(prefix, uint32_t(header.size()));
    put(prefix, uint64_t(payload.size()));
    put(prefix, uint64_t(extra.size()));
    std::string digest = digested({&prefix, &header, &payload, &extra});
    try {
      replace_file(path_, {&prefix, &digest, &header, &payload, &extra});
    } catch (const std::string& problem) {
      refuse("cannot be written: " + problem, path_);
    }
  }

  void load() {
    clear_leftovers(path_);
    Descriptor file(open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat info;
    if (file.get() < 0 || fstat(file.get(), &info))
      refuse("cannot be read: " + reason(), path_);
    if (!S_ISREG(info.st_mode)) refuse("is not a file", path_);
    std::string prefix = part(file, 0, std::min<int64_t>(PREFIX, info.st_size));
    if (prefix.size() < PREFIX || prefix.compare(0, 8, MAGIC))
      refuse("is not a saved state", path_);
    if (get(prefix, 8, 4) != VERSION)
      refuse("has version " + std::to_string(get(prefix, 8, 4)) + ", this library reads version 1",
             path_, "version");
    uint64_t lengths[] = {get(prefix, 12, 4), get(prefix, 16, 8), get(prefix, 24, 8)};
    uint64_t most[] = {MAX_HEADER, uint64_t(plus(s_.layout_.slot_bytes, whole_bytes())) + SLACK,
                       MAX_EXTRA};
    const char* const names[] = {"header", "payload", "extra"};
    uint64_t expected = PREFIX + DIGEST;
    for (int i = 0; i < 3; i++) {
      if (lengths[i] > most[i])
        refuse(
            std::to_string(lengths[i]) + " bytes, at most " + std::to_string(most[i]) + " expected",
            path_, names[i]);
      expected += lengths[i];
    }
    if (uint64_t(info.st_size) != expected)
      refuse(std::string(uint64_t(info.st_size) < expected ? "is cut short"
                                                           : "has bytes after its end") +
                 ": " + std::to_string(info.st_size) + " bytes, " + std::to_string(expected) +
                 " expected; the save before it is at " + path_ + "~",
             path_);
    std::string digest = part(file, PREFIX, DIGEST), parts[3];
    int64_t at = PREFIX + DIGEST;
    for (int i = 0; i < 3; at += int64_t(lengths[i]), i++)
      parts[i] = part(file, at, int64_t(lengths[i]));
    if (digested({&prefix, &parts[0], &parts[1], &parts[2]}) != digest)
      refuse("does not match its SHA-256: it is damaged; the save before it is at " + path_ + "~",
             path_);
    bool whole = true;
    int64_t position = check_header(parts[0], &whole);
    auto places = placed(position, whole);
    const char* data = check_payload(parts[1], places);
    read_extra(parts[2], position);
    adopt(position, places, data);
  }

 private:
  std::string part(const Descriptor& file, int64_t at, int64_t size) {
    std::string out(size_t(size), '\0');
    read_at(file, at, out.data(), out.size(), EDGE_ERROR_STATE, path_);
    return out;
  }

  static std::string digested(const std::vector<const std::string*>& parts) {
    Sha256 digest;
    for (const std::string* each : parts) digest.add(each->data(), each->size());
    std::string out(DIGEST, '\0');
    digest.end(reinterpret_cast<uint8_t*>(out.data()));
    return out;
  }

  // Bytes of full caches with the rows of all tokens.
  int64_t whole_bytes() const {
    int64_t out = 0;
    for (const Tensor& cache : s_.layout_.caches)
      out = plus(out, times(times(cache.dims[1], s_.sizes_.capacity), cache.row()));
    return out;
  }

  // Number of tokens whose rows are saved of a cache. If not `whole`, those that the next token
  // attends to in the layer with the largest window, as engines with sliding caches save them.
  int64_t rows_of(size_t cache, int64_t position, bool whole) const {
    const Config& config = s_.bundle().config;
    if (whole || !config.windows[cache]) return position;
    return std::min(position, config.looks_back() - 1);
  }

  // The tensors of a saved state, in the order of `save`.
  std::vector<std::pair<std::string, SavedTensor>> placed(int64_t position,
                                                          bool whole) const {
    std::vector<std::pair<std::string, SavedTensor>> out;
    int64_t at = 0;
    auto add = [&](const Tensor& tensor, const std::vector<int64_t>& shape, int64_t bytes) {
      out.push_back({tensor.name, {shape, tensor.type, at, at + bytes}});
      at += bytes;
    };
    for (const Tensor& tensor : s_.layout_.recurrent) add(tensor, tensor.dims, tensor.slot);
    for (size_t i = 0; i < s_.layout_.caches.size(); i++) {
      const Tensor& cache = s_.layout_.caches[i];
      std::vector<int64_t> shape = cache.dims;
      shape[2] = rows_of(i, position, whole);
      add(cache, shape, shape[1] * shape[2] * shape[3] * item_size(cache.type));
    }
    return out;
  }

  std::string described(int64_t position, bool whole) const {
    const Bundle& bundle = s_.bundle();
    std::string out = "{\"identity\": {\"model\": " + text(bundle.model_identity) +
                      ", \"quantization\": " + text(bundle.recipe) +
                      ", \"tokenizer\": " + text(bundle.tokenizer_identity) +
                      "}, \"position\": " + std::to_string(position) +
                      ", \"batch\": 1, \"layout\": {";
    bool first = true;
    for (const auto& [name, tensor] : placed(position, whole)) {
      out += (first ? "" : ", ") + text(name) + ": " + list(tensor.shape);
      first = false;
    }
    return out + "}}";
  }

  // The transcript, as runtime/transcript.py writes it.
  std::string told() const {
    std::string folder = s_.bundle().path();
    while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
    std::string tokens;
    for (int32_t token : s_.tokens_) tokens += (tokens.empty() ? "" : ", ") + std::to_string(token);
    return "{\"session\": 1, \"model\": " + text(folder.substr(folder.rfind('/') + 1)) +
           ", \"messages\": " + s_.messages_ + ", \"tokens\": [" + tokens +
           "], \"pending\": " + (s_.pending_ < 0 ? "null" : std::to_string(s_.pending_)) +
           ", \"rng\": {\"kind\": \"PCG64\", \"state\": \"" + decimal(s_.rng_.state) +
           "\", \"inc\": \"" + decimal(s_.rng_.increment) +
           "\", \"has_uint32\": 0, \"uinteger\": 0}}";
  }

  Json document(const std::string& data, const char* field) const {
    try {
      Json found = parse_json(data, MAX_VALUES);
      if (!found.is(Json::object)) refuse("is not an object", path_, field);
      return found;
    } catch (const std::string& problem) {
      refuse("is not JSON: " + problem, path_, field);
    }
  }

  // Returns the position. `whole` receives whether every cache has the rows of all tokens.
  int64_t check_header(const std::string& data, bool* whole) const {
    Json header = document(data, "header");
    const Json *identity = header.find("identity"), *position = header.find("position"),
               *batch = header.find("batch");
    if (!identity || !identity->is(Json::object)) refuse("is not understood", path_, "header");
    Faults faults;
    const Bundle& bundle = s_.bundle();
    const std::pair<const char*, const std::string*> ours[] = {
        {"model", &bundle.model_identity},
        {"quantization", &bundle.recipe},
        {"tokenizer", &bundle.tokenizer_identity}};
    bool older = false;  // earlier versions wrote the bundle's fingerprint as the model
    for (auto [field, own] : ours) {
      const Json* theirs = identity->find(field);
      bool text = theirs && theirs->is(Json::text);
      bool before = text && own == &bundle.model_identity && theirs->string() == bundle.fingerprint;
      older = older || before;
      if (!before && !(text && theirs->string() == *own))
        faults.add(field, std::string("was saved with another ") + field +
                              ": open it with the bundle it was saved with");
    }
    faults.refuse(EDGE_ERROR_STATE, path_);
    if (!batch || !batch->is(Json::integer) || batch->whole() != 1)
      refuse("holds several sequences, but a session has one", path_, "batch");
    if (!position || !position->is(Json::integer) || position->whole() < 0 ||
        position->whole() >= int64_t(1) << 62)
      refuse("is not a number of tokens", path_, "position");
    if (!s_.layout_.caches.empty() && position->whole() > s_.sizes_.capacity)
      refuse("holds " + std::to_string(position->whole()) +
                 " tokens, the KV caches have room for " + std::to_string(s_.sizes_.capacity),
             path_, "position");
    auto same_layout = [&](const Json& wanted) {
      return header.keys().size() == wanted.keys().size() && header.find("layout") &&
             *header.find("layout") == wanted["layout"];
    };
    Json wanted = parse_json(described(position->whole(), true));
    *whole = same_layout(wanted);
    bool same = *whole || same_layout(parse_json(described(position->whole(), false)));
    if (!same || !(older || *identity == wanted["identity"]))
      refuse("does not describe this model's state", path_, "layout");
    return position->whole();
  }

  // Returns the start of the tensors' data, and updates `places` to the file's offsets.
  const char* check_payload(const std::string& data,
                            std::vector<std::pair<std::string, SavedTensor>>& places) const {
    uint64_t size = data.size() < 8 ? 0 : get(data, 0, 8);
    if (data.size() < 8 || size > data.size() - 8)
      refuse("is not safetensors data", path_, "payload");
    Json named = document(data.substr(8, size), "payload");
    int64_t bytes = int64_t(data.size() - 8 - size), used = 0;
    size_t known = named.find("__metadata__") ? 1 : 0;
    if (named.keys().size() != places.size() + known)
      refuse("does not hold this model's tensors", path_, "payload");
    std::vector<std::pair<int64_t, int64_t>> spans;
    for (auto& [name, tensor] : places) {
      const Json* found = named.find(name);
      if (!found || !found->is(Json::object))
        refuse("does not hold this model's tensors", path_, "payload");
      const Json *type = found->find("dtype"), *shape = found->find("shape"),
                 *at = found->find("data_offsets");
      if (!type || !(*type == Json::of(SAFE[int(tensor.type)])))
        refuse("has another dtype than this model's", path_, name);
      if (!shape || !(*shape == parse_json(list(tensor.shape))))
        refuse("does not hold this model's tensors", path_, "payload");
      bool pair = at && at->is(Json::array) && at->items().size() == 2 &&
                  at->items()[0].is(Json::integer) && at->items()[1].is(Json::integer);
      int64_t begin = pair ? at->items()[0].whole() : -1, end = pair ? at->items()[1].whole() : -1;
      if (begin < 0 || end > bytes || end - begin != tensor.end - tensor.begin)
        refuse("is not safetensors data", path_, "payload");
      tensor.begin = begin, tensor.end = end;
      used += end - begin;
      spans.push_back({begin, end});
    }
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); i++)
      if (spans[i].first < spans[i - 1].second) refuse("is not safetensors data", path_, "payload");
    if (used != bytes) refuse("is not safetensors data", path_, "payload");
    const char* start = data.data() + 8 + size;
    for (const auto& [name, tensor] : places)
      if (!finite(start + tensor.begin, tensor.end - tensor.begin, tensor.type))
        refuse("is not finite", path_, name);
    return start;
  }

  int32_t id(const Json& value) const {
    if (!value.is(Json::integer) || value.whole() < 0 || value.whole() >= s_.bundle().config.vocab)
      refuse("has a malformed transcript: a token id is out of range", path_, "extra");
    return int32_t(value.whole());
  }

  // Reads the transcript of Session.save. Another program's extra is kept unread.
  void read_extra(const std::string& data, int64_t position) {
    Json extra = document(data, "extra");
    extra_ = data;
    const Json* version = extra.find("session");
    if (!version) return;
    if (!version->is(Json::integer) || version->whole() != 1)
      refuse("holds a session version other than 1", path_, "extra.session");
    const Json *messages = extra.find("messages"), *tokens = extra.find("tokens"),
               *pending = extra.find("pending"), *rng = extra.find("rng");
    if (!messages || !messages->is(Json::array) || !tokens || !tokens->is(Json::array) ||
        !pending || !rng)
      refuse("has a malformed transcript", path_, "extra");
    for (const Json& token : tokens->items()) tokens_.push_back(id(token));
    if (int64_t(tokens_.size()) != position)
      refuse("transcript and state disagree", path_, "extra.tokens");
    if (!pending->is(Json::null)) pending_ = id(*pending);
    const Json *kind = rng->find("kind"), *state = rng->find("state"),
               *increment = rng->find("inc");
    bool known = kind && *kind == Json::of("PCG64") && state && state->is(Json::text) &&
                 increment && increment->is(Json::text);
    if (!known || !from_decimal(state->string(), &rng_.state) ||
        !from_decimal(increment->string(), &rng_.increment))
      refuse("has malformed random numbers", path_, "extra.rng");
    told_ = true;
    messages_.clear();
    write_json(messages_, *messages);
  }

  void adopt(int64_t position, const std::vector<std::pair<std::string, SavedTensor>>& places,
             const char* data) {
    s_.tokens_.reserve(tokens_.size());
    s_.ledger_.make_room(0);
    Ledger after = s_.ledger_.elsewhere(position, 0);
    after.first = s_.layout_.first_needed(position);
    size_t states = s_.layout_.recurrent.size();
    for (size_t i = 0; i < places.size(); i++) {
      const SavedTensor& tensor = places[i].second;
      if (i < states)
        std::memcpy(s_.slot(s_.layout_.recurrent[i], after.source()), data + tensor.begin,
                    size_t(tensor.end - tensor.begin));
      else
        s_.take_rows(s_.layout_.caches[i - states], data + tensor.begin, tensor.shape[2], position,
                     after.first);
    }
    s_.ledger_ = after;
    s_.rows_ = 0;
    s_.tokens_.assign(tokens_.begin(), tokens_.end());
    s_.pending_ = pending_;
    s_.messages_.swap(messages_), s_.extra_.swap(extra_);
    if (told_) s_.rng_ = rng_;
  }

  Session& s_;
  std::string path_;
  // loaded values, until `adopt`
  std::vector<int32_t> tokens_;
  int32_t pending_ = -1;
  bool told_ = false;  // the file has a transcript
  Rng rng_;
  std::string messages_ = "[]", extra_;
};

void Session::save(const std::string& path) { StateFile(*this, path).save(); }
void Session::load(const std::string& path) { StateFile(*this, path).load(); }

}  // namespace edge_lib
