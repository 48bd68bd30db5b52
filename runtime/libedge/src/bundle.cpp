#include "bundle.h"

#include <algorithm>

#include "schema.h"
#include "sha256.h"

namespace edge_lib {

namespace {

constexpr int64_t MANIFEST = 2 << 20;  // bytes
constexpr int64_t OTHER = 256 << 20;   // bytes of a file other than weights
constexpr int64_t OTHERS = 1 << 30;    // bytes of all of them together
const char WEIGHT_FILE[] = "weights.bin";
const char MANIFEST_FILE[] = "manifest.json";
const char* const ARCHITECTURES[] = {"sm_75", "sm_80", "sm_86",  "sm_87",
                                     "sm_89", "sm_90", "sm_100", "sm_120"};

bool ends_with(const std::string& text, const char* end) {
  std::string tail = end;
  return text.size() >= tail.size() && !text.compare(text.size() - tail.size(), tail.npos, tail);
}

std::string text_at(const Json& object, const char* key) {
  const Json* found = object.find(key);
  return found && found->is(Json::text) ? found->string() : "";
}

std::string some(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < std::min<size_t>(names.size(), 5); i++) out += (i ? ", " : "") + names[i];
  return names.size() > 5 ? out + " and " + std::to_string(names.size() - 5) + " more" : out;
}

std::string read_whole(const Folder& folder, const char* file, int64_t most) {
  Descriptor opened = folder.open(file);
  std::string name = folder.path() + "/" + file, out;
  int64_t size = size_of(opened);
  if (size > most)
    throw Fault{
        EDGE_ERROR_BUNDLE,
        "has " + std::to_string(size) + " bytes, at most " + std::to_string(most) + " allowed",
        name, ""};
  read_blocks(opened, size, name, [&](const char* data, size_t count) { out.append(data, count); });
  return out;
}

}  // namespace

Json parse_document(const std::string& raw, const std::string& file, const Schema& schema,
                    bool versioned) {
  Json found;
  try {
    found = parse_json(raw);
  } catch (const std::string& problem) {
    throw Fault{EDGE_ERROR_BUNDLE, "is not valid JSON: " + problem, file, ""};
  }
  const Json* version = found.find("schema_version");
  bool known = version ? version->is(Json::integer) && version->whole() == 1 : !versioned;
  if (!found.is(Json::object) || !known)
    throw Fault{EDGE_ERROR_BUNDLE, "is not version 1, which this library reads", file,
                "schema_version"};
  Faults faults;
  schema.check(found, faults);
  faults.refuse(EDGE_ERROR_BUNDLE, file);
  return found;
}

Bundle::Bundle(const std::string& path) : folder_(path) {
  std::string raw = read_whole(folder_, MANIFEST_FILE, MANIFEST), file = path + "/" + MANIFEST_FILE;
  fingerprint = edge_lib::sha256(raw);
  manifest = parse_document(raw, file, Schema::manifest(), true);
  Faults faults;
  config = Config::of(manifest["model"], faults);
  check_files(faults);
  check_tokenizer(faults);
  check_names(faults);
  faults.refuse(EDGE_ERROR_BUNDLE, file);
  chunk = manifest["limits"]["chunk"].whole();
  recipe = manifest["quantization"]["recipe"].string();
  chat_template = text_at(manifest, "chat_template");
  if (const Json* dtypes = manifest.find("state_dtypes"))
    for (size_t i = 0; i < dtypes->keys().size(); i++)
      state_dtypes[dtypes->keys()[i]] = dtypes->items()[i].string();
  check_listing();
  identify();
}

void Bundle::check_files(Faults& faults) {
  std::vector<std::string> twice;
  int64_t others = 0;
  for (const Json& file : manifest["files"].items()) {
    const std::string& path = file["path"].string();
    int64_t size = file["size"].whole();
    std::string wrong = not_relative(path);
    if (!wrong.empty()) faults.add("files.path", "\"" + brief(path) + "\" " + wrong);
    bool weights = path == WEIGHT_FILE;
    if (!weights) others = plus(others, size);
    if (size > OTHER && !weights)
      faults.add(path, "has " + std::to_string(size) + " bytes, at most " + std::to_string(OTHER) +
                           " allowed");
    if (!entries_.insert({path, {size, file["sha256"].string()}}).second) twice.push_back(path);
  }
  if (others > OTHERS)
    faults.add("files", "besides weights have " + std::to_string(others) + " bytes, at most " +
                            std::to_string(OTHERS) + " allowed");
  if (!twice.empty()) faults.add("files", "listed twice: " + some(twice));
}

void Bundle::check_tokenizer(Faults& faults) {
  const Json& told = manifest["tokenizer"];
  tokenizer = told["kind"].string();
  tokenizer_file = text_at(told, "file");
  token_count = told["vocab_size"].whole();
  auto id = [&](const char* name) {
    const Json* found = told.find(name);
    return found && found->is(Json::integer) ? narrowed(found->whole()) : -1;
  };
  bos = id("bos"), pad = id("pad");
  if (const Json* begins = told.find("add_bos")) add_bos = begins->truth();
  if (const Json* ends = told.find("eos"))
    for (const Json& each : ends->items())
      eos.push_back(narrowed(each.whole()));
  const Json *file = told.find("file"), *digest = told.find("sha256");
  bool named = file && file->is(Json::text), hashed = digest && digest->is(Json::text);
  if ((tokenizer == "bytes") == named)
    faults.add("tokenizer", "a byte tokenizer has no file, all others have one");
  if (named != hashed) faults.add("tokenizer", "file and sha256 go together");
  tokenizer_identity = hashed ? digest->string() : tokenizer;
}

void Bundle::check_names(Faults& faults) const {
  auto listed = [&](const std::string& field, const std::string& path) {
    if (!entries_.count(path))
      faults.add(field, "names " + brief(path) + ", which is not in files");
  };
  const Json& graphs = manifest["graphs"];
  for (size_t i = 0; i < graphs.keys().size(); i++)
    listed("graphs." + graphs.keys()[i], graphs.items()[i].string());
  const Json* kernels = manifest.find("kernels");
  for (size_t i = 0; kernels && i < kernels->keys().size(); i++) {
    const std::string &name = kernels->keys()[i], &path = kernels->items()[i].string();
    listed("kernels." + name, path);
    if (std::find(std::begin(ARCHITECTURES), std::end(ARCHITECTURES), name) ==
        std::end(ARCHITECTURES))
      faults.add("kernels." + brief(name), "names an unknown architecture");
    else if (path != "kernels/" + name + "/kernels.json")
      faults.add("kernels." + name, "has its index at " + brief(path));
    if (!graphs.find("cuda"))
      faults.add("graphs.cuda", "names no launch plan, but there are kernels");
  }
  if (!tokenizer_file.empty()) listed("tokenizer.file", tokenizer_file);
  const Json* chat = manifest.find("chat_template");
  if (chat && chat->is(Json::text)) listed("chat_template", chat->string());
}

void Bundle::check_listing() const {
  std::set<std::string> found = folder_.files();
  found.erase(MANIFEST_FILE);
  std::vector<std::string> missing, extra;
  for (const auto& [path, entry] : entries_)
    if (!found.count(path)) missing.push_back(path);
  for (const std::string& path : found)
    if (!entries_.count(path)) extra.push_back(path);
  std::string wrong = missing.empty() ? "" : "is missing " + some(missing);
  if (!extra.empty()) {
    if (!wrong.empty()) wrong += "; ";
    wrong += "holds files the manifest does not list: " + some(extra);
  }
  if (!wrong.empty()) throw Fault{EDGE_ERROR_BUNDLE, wrong, path(), ""};
}

void Bundle::identify() {
  const Json& graphs = manifest["graphs"];
  std::string graph = text_at(graphs, "ort");
  if (graph.empty())
    for (const Json& each : graphs.items())
      graph = graph.empty() ? each.string() : std::min(graph, each.string());
  std::string text = "{\"config\": ";
  Schema::manifest().write(text, manifest["model"], "ModelConfig");
  text += ", \"files\": {";
  bool first = true;
  for (const auto& [path, entry] : entries_) {
    if (path != graph && !ends_with(path, ".bin")) continue;
    if (!first) text += ", ";
    first = false;
    write_text(text, path);
    text += ": \"" + entry.sha256 + "\"";
  }
  text += "}, \"states\": {";
  first = true;
  for (const auto& [name, dtype] : state_dtypes) {
    if (!first) text += ", ";
    first = false;
    write_text(text, name);
    text += ": \"" + dtype + "\"";
  }
  model_identity = edge_lib::sha256(text + "}}");
}

const Bundle::Entry* Bundle::entry(const std::string& file) const {
  auto found = entries_.find(file);
  return found == entries_.end() ? nullptr : &found->second;
}

std::string Bundle::read(const std::string& file, int64_t most) const {
  const Entry* known = entry(file);
  if (known && known->size > most)
    throw Fault{EDGE_ERROR_BUNDLE,
                "has " + std::to_string(known->size) + " bytes, at most " + std::to_string(most) +
                    " allowed",
                path() + "/" + file, ""};
  std::string out;
  read(file, [&](const char* data, size_t count) { out.append(data, count); });
  return out;
}

void Bundle::read(const std::string& file,
                  const std::function<void(const char*, size_t)>& take) const {
  const Entry* known = entry(file);
  std::string name = path() + "/" + file;
  if (!known) throw Fault{EDGE_ERROR_BUNDLE, "is not listed in the manifest", name, ""};
  Descriptor opened = folder_.open(file);
  if (size_of(opened) != known->size)
    throw Fault{EDGE_ERROR_BUNDLE,
                "has " + std::to_string(size_of(opened)) + " bytes, the manifest says " +
                    std::to_string(known->size),
                name, ""};
  if (is_mostly_holes(opened, known->size))
    throw Fault{EDGE_ERROR_BUNDLE, "is sparse: most of it was never written", name, ""};
  Sha256 digest;
  read_blocks(opened, known->size, name, [&](const char* data, size_t count) {
    digest.add(data, count);
    take(data, count);
  });
  if (digest.hexadecimal() != known->sha256)
    throw Fault{EDGE_ERROR_BUNDLE, "does not match its SHA-256; it was altered or damaged", name,
                ""};
}

void Bundle::verify() const {
  for (const auto& [path, entry] : entries_) read(path, [](const char*, size_t) {});
}

}  // namespace edge_lib
