// A bundle's manifest, checked, and its files, read through the descriptor they are checked by.
#pragma once

#include <map>

#include "config.h"
#include "folder.h"

namespace edge_lib {

class Schema;

// A JSON document with a schema version, of which `versioned` ones must tell it. Throws Fault.
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
  // What saved states belong to: see Identity in runtime/layout.py.
  std::string model_identity, tokenizer_identity;

  const std::string& path() const { return folder_.path(); }
  const Entry* entry(const std::string& file) const;
  // Content of a listed file of at most `most` bytes, checked.
  std::string read(const std::string& file, int64_t most) const;
  // Gives the content of a listed file in blocks; only when it returns were they right.
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
