// The form of a document: a JSON Schema made from the models that Python checks it with
// (runtime/cpu/schemas.py), so that both refuse the same.
#pragma once

#include "fault.h"
#include "json.h"

namespace edge_lib {

class Schema {
 public:
  explicit Schema(const char* text) : root_(parse_json(text)) {}

  void check(const Json& document, Faults& faults) const { check(root_, document, "", faults); }
  // A checked value of the definition `name` as Python writes it: keys in order, defaults filled
  // in.
  void write(std::string& out, const Json& value, const char* name) const;
  // What a checked object means where it leaves `key` out, or null.
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
  // The definition behind references and choices.
  const Json& meant(const Json& schema, const Json& value) const;
  void write(std::string& out, const Json& value, const Json& schema) const;

  Json root_;
};

}  // namespace edge_lib
