// JSON Schemas, generated from the models that Python checks documents with
// (runtime/cpu/schemas.py), so that both refuse the same documents.
#pragma once

#include "fault.h"
#include "json.h"

namespace edge_lib {

class Schema {
 public:
  explicit Schema(const char* text) : root_(parse_json(text)) {}

  void check(const Json& document, Faults& faults) const { check(root_, document, "", faults); }
  // Writes a checked value of the definition `name` as Python does: sorted keys, with defaults.
  void write(std::string& out, const Json& value, const char* name) const;
  // Returns the default of `key` in the definition `name`, or null.
  const Json* fallback(const char* name, const char* key) const;

  static const Schema& manifest();
  static const Schema& plan();

 private:
  void check(const Json& schema, const Json& value, const std::string& at, Faults& faults) const;
  void check_text(const Json& schema, const std::string& value, const std::string& at,
                  Faults& faults) const;
  void check_object(const Json& schema, const Json& value, const std::string& at,
                    Faults& faults) const;
  void check_array(const Json& schema, const Json& value, const std::string& at,
                   Faults& faults) const;
  // Resolves a reference or a choice; returns `schema` itself if no choice fits.
  const Json& meant(const Json& schema, const Json& value) const;
  void write(std::string& out, const Json& value, const Json& schema) const;

  Json root_;
};

}  // namespace edge_lib
