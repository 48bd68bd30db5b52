// Mutated bundles and states, for a build of libedge with sanitizers: each is refused, or opened
// and closed again. What was taken is not run: a plan is a program (docs/inside/threat-model.md).
//
//   libedge_fuzz BUNDLE FOLDER [COUNT [SEED]]    FOLDER: where copies are made
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>

#include "../runtime/libedge/src/sha256.h"

#include <edge.h>

namespace fs = std::filesystem;

static std::mt19937 random_numbers;

static size_t below(size_t count) { return random_numbers() % count; }

static std::string read(const fs::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

static void write(const fs::path& path, const std::string& data) {
  std::ofstream(path, std::ios::binary) << data;
}

// One to four changes: bits, bytes, cuts, repeats, numbers and punctuation, as tests/mutations.py.
static std::string mutated(std::string data) {
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

// The manifest with the size and hash that a file has now.
static std::string listed(std::string manifest, const std::string& path, const std::string& before,
                          const std::string& now) {
  auto change = [&](const std::string& from, const std::string& to) {
    size_t at = manifest.find(from);
    if (at != manifest.npos) manifest.replace(at, from.size(), to);
  };
  change(edge_lib::sha256(before), edge_lib::sha256(now));
  // keys are sorted: path, sha256, size
  size_t entry = manifest.find("\"path\": \"" + path + "\"");
  size_t size = manifest.find("\"size\": ", entry) + 8;
  manifest.replace(size, manifest.find_first_not_of("0123456789", size) - size,
                   std::to_string(now.size()));
  return manifest;
}

static bool opens(const fs::path& folder) {
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

int main(int count, char** words) {
  if (count < 3) return std::cerr << "usage: libedge_fuzz BUNDLE FOLDER [COUNT [SEED]]\n", 2;
  size_t rounds = count > 3 ? std::strtoul(words[3], nullptr, 10) : 3000, taken = 0;
  random_numbers.seed(count > 4 ? std::strtoul(words[4], nullptr, 10) : 0);
  fs::path folder = fs::path(words[2]) / "bundle", state = fs::path(words[2]) / "state";
  fs::remove_all(folder);
  fs::copy(words[1], folder, fs::copy_options::recursive);
  std::string manifest = read(folder / "manifest.json"), plan = read(folder / "graphs/cuda.json");
  for (size_t i = 0; i < rounds; i++) {
    bool of_plan = i % 2;
    std::string now = of_plan ? mutated(plan) : plan;
    write(folder / "graphs/cuda.json", now);
    write(folder / "manifest.json",
          of_plan ? listed(manifest, "graphs/cuda.json", plan, now) : mutated(manifest));
    taken += opens(folder);
  }
  write(folder / "manifest.json", manifest);
  write(folder / "graphs/cuda.json", plan);

  edge_error error;
  edge_bundle* bundle = nullptr;
  edge_model* model = nullptr;
  edge_session* session = nullptr;
  const int32_t tokens[] = {1, 2, 3};
  if (edge_bundle_open(folder.c_str(), &bundle, &error) ||
      edge_model_load(bundle, nullptr, &model, &error) ||
      edge_session_new(model, nullptr, &session, &error) ||
      edge_session_run(session, tokens, 3, nullptr, 0, nullptr, &error) ||
      edge_session_save(session, state.c_str(), &error))
    return std::cerr << error.message << "\n", 1;
  std::string saved = read(state);
  for (size_t i = 0; i < rounds; i++) {
    std::string body = mutated(saved.substr(64)), prefix = saved.substr(0, 32);
    if (body.size() != saved.size() - 64) continue;  // lengths are in the prefix
    edge_lib::Sha256 digest;
    digest.add(prefix.data(), prefix.size());
    digest.add(body.data(), body.size());
    uint8_t sum[32];
    digest.end(sum);
    write(state, prefix + std::string(reinterpret_cast<char*>(sum), 32) + body);
    taken += !edge_session_load(session, state.c_str(), &error);
  }
  edge_session_free(session);
  edge_model_close(model);
  edge_bundle_close(bundle);
  std::cout << taken << " of " << 2 * rounds << " were taken\n";
}
