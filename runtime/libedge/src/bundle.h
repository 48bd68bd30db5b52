// A bundle's checked manifest and its files, which are read through the descriptor they are checked
// with.
#pragma once

#include <map>

#include "config.h"
#include "folder.h"

namespace edge_lib {

class Schema;

constexpr int64_t MAX_FILE = 64 << 20;  // bytes of a file that is read as a whole

// Parses and checks a JSON document. `versioned`: it must state its schema version. Throws Fault.
Json parse_document(const std::string& raw, const std::string& file, const Schema& schema,
                    bool versioned);

class Bundle {
 public:
  struct Entry {
    int64_t size;
    std::string sha256;
  };

  explicit Bundle(const std::string& path);  // throws Fault

  Json manifest;
  std::string fingerprint;  // SHA-256 of manifest.json
  Config config;
  int64_t chunk, token_count;
  std::vector<int32_t> eos;
  int32_t bos = -1, pad = -1;
  bool add_bos = false;
  std::string tokenizer, tokenizer_file, chat_template, recipe;
  std::map<std::string, std::string> state_dtypes;
  // Identity of saved states: see Identity in runtime/layout.py.
  std::string model_identity, tokenizer_identity;

  const std::string& path() const { return folder_.path(); }
  const Entry* entry(const std::string& file) const;
  // Returns the checked content of a listed file of at most `most` bytes.
  std::string read(const std::string& file, int64_t most) const;
  // Passes the content of a listed file to `take` in blocks. They are checked once this returns.
  void read(const std::string& file, const std::function<void(const char*, size_t)>& take) const;
  void verify() const;

 private:
  void check_files(Faults& faults);
  void check_tokenizer(Faults& faults);
  void check_names(Faults& faults) const;
  void check_listing() const;
  void identify();

  Folder folder_;
  std::map<std::string, Entry> entries_;
};

}  // namespace edge_lib
