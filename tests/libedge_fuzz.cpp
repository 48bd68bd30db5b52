// Fuzzes the untrusted inputs of libedge: each is refused, or accepted and closed again. Accepted
// plans are not run: a plan is a program (docs/inside/threat-model.md).
//
//   EDGE_FUZZ_BUNDLE=… EDGE_FUZZ_FOLDER=… libedge_fuzz [COUNT [SEED]]      with built-in mutations
//   EDGE_FUZZ_BUNDLE=… EDGE_FUZZ_FOLDER=… libedge_fuzz -max_total_time=60  with clang's libFuzzer
//
// The first byte of an input is the kind of the others; seeds come from the bundle. FOLDER is
// rewritten for each input, which is fast on a RAM disk.
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>

#include "../runtime/libedge/src/json.h"
#include "../runtime/libedge/src/sha256.h"
#include "../runtime/libedge/src/tokenizer.h"

#include <edge.h>

namespace fs = std::filesystem;

namespace {

enum Kind { manifest, plan, state, json, pieces, vocabulary, kinds };
const char* const FILES[kinds] = {"manifest.json", "graphs/cuda.json",          "",
                                  "",              "tokenizer/tokenizer.model", ""};
// with a token of each kind, and added tokens
const char VOCABULARY[] = R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "\u0120": 2,
"ab": 3, "\u0120ab": 4, "1": 5, "<s>": 6}, "merges": ["a b", ["\u0120", "ab"]]}, "added_tokens":
[{"id": 6, "content": "<s>", "special": true}, {"id": 7, "content": "  ", "normalized": true}],
"normalizer": {"type": "NFC"}, "decoder": {"type": "ByteLevel"}, "pre_tokenizer": {"type":
"Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, {"type": "ByteLevel",
"add_prefix_space": false, "use_regex": true}]}})";

std::string read(const fs::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

void write(const fs::path& path, const std::string& data) {
  std::ofstream(path, std::ios::binary) << data;
}

// The bundle that inputs are written to, and a session that states are loaded into.
struct World {
  fs::path folder;
  std::string seeds[kinds];
  edge_session* session = nullptr;
  std::unique_ptr<edge_lib::Bundle> bundle;

  World() {
    const char *from = std::getenv("EDGE_FUZZ_BUNDLE"), *to = std::getenv("EDGE_FUZZ_FOLDER");
    if (!from || !to) std::cerr << "set EDGE_FUZZ_BUNDLE and EDGE_FUZZ_FOLDER\n", std::exit(2);
    folder = to;
    fs::remove_all(folder);
    fs::create_directories(folder);
    fs::copy(from, folder / "bundle", fs::copy_options::recursive);
    for (int kind = 0; kind < kinds; kind++)
      if (*FILES[kind]) seeds[kind] = read(folder / "bundle" / FILES[kind]);
    edge_error error;
    edge_bundle* bundle = nullptr;
    edge_model* model = nullptr;
    const int32_t tokens[] = {1, 2, 3};
    std::string file = (folder / "state").string();
    if (edge_bundle_open((folder / "bundle").c_str(), &bundle, &error) ||
        edge_model_load(bundle, nullptr, &model, &error) ||
        edge_session_new(model, nullptr, &session, &error) ||
        edge_session_run(session, tokens, 3, nullptr, 0, nullptr, &error) ||
        edge_session_save(session, file.c_str(), &error))
      std::cerr << error.message << "\n", std::exit(1);
    edge_model_close(model);
    edge_bundle_close(bundle);
    seeds[state] = read(file);
    this->bundle = std::make_unique<edge_lib::Bundle>((folder / "bundle").string());
    seeds[vocabulary] = VOCABULARY;
    seeds[json] = "{\"a\": [1, -2.5e-3, true, null, \"\\u00fc\\ud83d\\ude00\"]}";
  }
  ~World() { edge_session_free(session); }
};

World& world() {
  static World made;
  return made;
}

// Returns the manifest with a file's new size and hash.
std::string listed(std::string text, const std::string& path, const std::string& before,
                   const std::string& now) {
  std::string was = edge_lib::sha256(before), is = edge_lib::sha256(now);
  for (size_t at = 0; (at = text.find(was, at)) != text.npos; at += is.size())
    text.replace(at, was.size(), is);
  // keys are sorted: path, sha256, size
  size_t entry = text.find("\"path\": \"" + path + "\"");
  size_t size = text.find("\"size\": ", entry) + 8;
  return text.replace(size, text.find_first_not_of("0123456789", size) - size,
                      std::to_string(now.size()));
}

bool opens(const fs::path& folder) {
  edge_error error;
  edge_bundle* bundle = nullptr;
  edge_model* model = nullptr;
  edge_session* session = nullptr;
  edge_memory memory = EDGE_MEMORY;
  edge_session_options options = EDGE_SESSION_OPTIONS;
  options.history = 16;
  bool taken = !edge_bundle_open(folder.c_str(), &bundle, &error) &&
               !edge_bundle_memory(bundle, &options, &memory, &error) && memory.total < 1 << 28 &&
               !edge_model_load(bundle, nullptr, &model, &error) &&
               !edge_session_new(model, &options, &session, &error);
  edge_session_free(session);
  edge_model_close(model);
  edge_bundle_close(bundle);
  return taken;
}

bool opens_with(Kind kind, const std::string& data) {
  World& own = world();
  fs::path bundle = own.folder / "bundle";
  const std::string& before = own.seeds[manifest];
  write(bundle / FILES[kind], data);
  if (kind != manifest)
    write(bundle / FILES[manifest], listed(before, FILES[kind], own.seeds[kind], data));
  bool taken = opens(bundle);
  write(bundle / FILES[kind], own.seeds[kind]);
  write(bundle / FILES[manifest], before);
  return taken;
}

// Loads a state, with its digest corrected.
bool loads(std::string data) {
  if (data.size() > 64) {
    edge_lib::Sha256 digest;
    digest.add(data.data(), 32);
    digest.add(data.data() + 64, data.size() - 64);
    digest.end(reinterpret_cast<uint8_t*>(data.data()) + 32);
  }
  std::string file = (world().folder / "state").string();
  write(file, data);
  edge_error error;
  return !edge_session_load(world().session, file.c_str(), &error);
}

bool parses(const std::string& data) {
  std::string once, twice;
  try {
    write_json(once, edge_lib::parse_json(data));
  } catch (const std::string&) {
    return false;
  }
  // what is written must parse to the same; numbers that overflow to infinity are refused
  write_json(twice, edge_lib::parse_json(once));
  if (once != twice) std::abort();
  return true;
}

// Reads a tokenizer, then encodes and decodes a text that includes the file's end.
bool reads(Kind kind, const std::string& data) {
  auto read = kind == pieces ? edge_lib::read_sentencepiece : edge_lib::read_tokenizer_json;
  try {
    auto tokenizer = read(data, *world().bundle);
    std::string text = " ab  ab 12<s>\n \xc3\xa9" + data.substr(data.size() - data.size() % 64);
    edge_part part = {text.data(), text.size(), int32_t(data.size() % 2)};
    for (int32_t id : tokenizer->encode(&part, 1)) tokenizer->bytes(id);
  } catch (const std::string&) {
    return false;
  } catch (const edge_lib::Fault&) {
    return false;
  }
  return true;
}

bool taken(const std::string& input) {
  if (input.empty()) return false;
  std::string data = input.substr(1);
  switch (uint8_t(input[0]) % kinds) {
    case state: return loads(data);
    case json: return parses(data);
    case pieces: return reads(pieces, data);
    case vocabulary: return reads(vocabulary, data);
    default: return opens_with(Kind(uint8_t(input[0]) % kinds), data);
  }
}

}  // namespace

#ifdef EDGE_LIBFUZZER

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  fs::create_directories(world().folder / "corpus");
  for (int kind = 0; kind < kinds; kind++)
    write(world().folder / "corpus" / std::to_string(kind),
          std::string(1, char(kind)) + world().seeds[kind]);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  taken(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}

#else

namespace {

std::mt19937 random_numbers;

size_t below(size_t count) { return random_numbers() % count; }

// Makes one to four changes: bits, bytes, cuts, repeats, numbers, punctuation: see mutations.py.
std::string mutated(std::string data) {
  static const char* const pieces[] = {"0",     "-1", "255", "2147483648", "18446744073709551615",
                                       "1e999", "{",  "}",   "[",          "]",
                                       "\"",    ":",  ",",   "null",       "\\ud800"};
  for (size_t changes = 1 + below(4); changes > 0 && !data.empty(); changes--) {
    size_t at = below(data.size());
    switch (below(6)) {
      case 0: data[at] = char(data[at] ^ 1 << below(8)); break;
      case 1: data[at] = char(below(256)); break;
      case 2: data.erase(at, 1 + below(16)); break;
      case 3: data.insert(at, data.substr(at, 1 + below(64))); break;
      case 4: data.replace(at, below(4), pieces[below(15)]); break;
      default:
        if (!below(8)) data.erase(at);
    }
  }
  return data;
}

}  // namespace

int main(int count, char** words) {
  size_t rounds = count > 1 ? std::strtoul(words[1], nullptr, 10) : 10000, good = 0;
  random_numbers.seed(count > 2 ? std::strtoul(words[2], nullptr, 10) : 0);
  for (size_t i = 0; i < rounds; i++)
    good += taken(std::string(1, char(i % kinds)) + mutated(world().seeds[i % kinds]));
  std::cout << good << " of " << rounds << " were accepted\n";
}

#endif
