#include "schema.h"

#include <algorithm>
#include <cstring>

namespace edge_lib {

namespace {

const char MANIFEST[] =
#include "schema_manifest.inc"
    ;
const char PLAN[] =
#include "schema_plan.inc"
    ;

bool all(std::string_view s, const char* allowed) {
  return s.find_first_not_of(allowed) == std::string_view::npos;
}

const char LOWER[] = "abcdefghijklmnopqrstuvwxyz", DIGITS[] = "0123456789";

// A lowercase letter, then lowercase letters, digits and _.
bool is_name(std::string_view s) {
  return !s.empty() && std::strchr(LOWER, s[0]) && s[0] &&
         all(s, "abcdefghijklmnopqrstuvwxyz0123456789_");
}

bool is_triton_type(std::string_view s) {
  if (s.size() > 3 && s.substr(s.size() - 3) == ":16") s.remove_suffix(3);
  if (!s.empty() && s[0] == '*') s.remove_prefix(1);
  size_t letters = std::min(s.find_first_not_of(LOWER), s.size());
  return letters > 0 && all(s.substr(letters), DIGITS);
}

// Matches the patterns that the schemas use, without a regular expression engine. A test checks
// that none is missing.
bool matches(std::string_view pattern, std::string_view s) {
  if (pattern == "^[0-9a-f]{64}$") return s.size() == 64 && all(s, "0123456789abcdef");
  if (pattern == "^([0-9a-f]{2})*$") return s.size() % 2 == 0 && all(s, "0123456789abcdef");
  if (pattern == "^[TBLCS]{0,4}$") return s.size() <= 4 && all(s, "TBLCS");
  if (pattern == "^(\\*?[a-z]+[0-9]*)(:16)?$") return is_triton_type(s);
  if (pattern == "^[a-z][a-z0-9_]*\\.[a-z][a-z0-9_]*$") {
    size_t dot = s.find('.');
    return dot != s.npos && is_name(s.substr(0, dot)) && is_name(s.substr(dot + 1));
  }
  return false;
}

// Infinities are text, and allowed only where the schema says so.
bool is_number(const Json& schema, const Json& value) {
  return value.is(Json::integer) || value.is(Json::real) ||
         (value.infinite() && schema.find("infinite"));
}

std::string below(const std::string& at, const std::string& key) {
  return at.empty() ? key : at + "." + key;
}

std::string shown(const Json& bound) {
  std::string out;
  write_json(out, bound);
  return out;
}

void check_bounds(const Json& schema, double value, const std::string& at, Faults& faults) {
  struct {
    const char *key, *say;
    bool (*holds)(double, double);
  } const bounds[] = {
      {"minimum", "at least ", [](double a, double b) { return a >= b; }},
      {"exclusiveMinimum", "above ", [](double a, double b) { return a > b; }},
      {"maximum", "at most ", [](double a, double b) { return a <= b; }},
      {"exclusiveMaximum", "below ", [](double a, double b) { return a < b; }},
  };
  for (const auto& bound : bounds)
    if (const Json* limit = schema.find(bound.key))
      if (!bound.holds(value, limit->number()))
        faults.add(at, std::string("must be ") + bound.say + shown(*limit));
}

}  // namespace

const Schema& Schema::manifest() {
  static const Schema made(MANIFEST);
  return made;
}
const Schema& Schema::plan() {
  static const Schema made(PLAN);
  return made;
}

void Schema::check(const Json& schema, const Json& value, const std::string& at,
                   Faults& faults) const {
  if (schema.find("$ref") || schema.find("oneOf")) {
    const Json& chosen = meant(schema, value);
    if (&chosen == &schema) return faults.add(below(at, "kind"), "is not known to this version");
    return check(chosen, value, at, faults);
  }
  if (const Json* choices = schema.find("anyOf")) {
    Faults best;
    for (const Json& choice : choices->items()) {
      Faults found;
      check(choice, value, at, found);
      if (!found.count()) return;
      if (!best.count() || found.count() < best.count()) best = found;
    }
    // for an optional value, report its only fault; otherwise that no form fits
    bool alone = choices->items().size() == 2;
    return alone && best.count() == 1 ? faults.add(at, best.first())
                                      : faults.add(at, "has none of the allowed forms");
  }
  const Json* named = schema.find("type");
  std::string type = named ? named->string() : "";
  static const std::pair<const char*, const char*> forms[] = {
      {"object", "an object"}, {"array", "a list"},          {"string", "text"},
      {"null", "null"},        {"boolean", "true or false"}, {"integer", "a whole number"},
      {"number", "a number"}};
  for (const auto& form : forms) {
    if (type != form.first) continue;
    Json::Kind kinds[] = {Json::object,  Json::array,   Json::text, Json::null,
                          Json::boolean, Json::integer, Json::real};
    bool fits = type == "number" ? is_number(schema, value) : value.is(kinds[&form - forms]);
    if (!fits) return faults.add(at, std::string("must be ") + form.second);
  }
  if (const Json* only = schema.find("const"))
    if (!(value == *only)) faults.add(at, "must be " + shown(*only));
  if (const Json* listed = schema.find("enum")) {
    const auto& items = listed->items();
    if (std::find(items.begin(), items.end(), value) == items.end())
      faults.add(at, "must be one of " + shown(*listed));
  }
  if (type == "integer" || type == "number") check_bounds(schema, value.number(), at, faults);
  if (type == "string") check_text(schema, value.string(), at, faults);
  if (type == "object") check_object(schema, value, at, faults);
  if (type == "array") check_array(schema, value, at, faults);
}

void Schema::check_text(const Json& schema, const std::string& value, const std::string& at,
                        Faults& faults) const {
  int64_t length = int64_t(characters(value));
  const Json *least = schema.find("minLength"), *most = schema.find("maxLength");
  if ((least && length < least->whole()) || (most && length > most->whole()))
    return faults.add(at, "has " + std::to_string(length) + " characters");
  const Json* pattern = schema.find("pattern");
  if (pattern && !matches(pattern->string(), value))
    faults.add(at, "\"" + brief(value) + "\" does not match " + pattern->string());
}

void Schema::check_object(const Json& schema, const Json& value, const std::string& at,
                          Faults& faults) const {
  const Json *known = schema.find("properties"), *others = schema.find("additionalProperties"),
             *names = schema.find("propertyNames");
  if (const Json* required = schema.find("required"))
    for (const Json& name : required->items())
      if (!value.find(name.string())) faults.add(below(at, name.string()), "is missing");
  for (size_t i = 0; i < value.keys().size(); i++) {
    const std::string& key = value.keys()[i];
    std::string here = below(at, brief(key));
    const Json* own = known ? known->find(key) : nullptr;
    if (names) check_text(*names, key, here, faults);
    if (own)
      check(*own, value.items()[i], here, faults);
    else if (others && others->is(Json::object))
      check(*others, value.items()[i], here, faults);
    else if (others)
      faults.add(here, "is not known to this version");
  }
}

void Schema::check_array(const Json& schema, const Json& value, const std::string& at,
                         Faults& faults) const {
  int64_t count = int64_t(value.items().size());
  const Json *least = schema.find("minItems"), *most = schema.find("maxItems");
  if ((least && count < least->whole()) || (most && count > most->whole()))
    return faults.add(at, "has " + std::to_string(count) + " elements");
  const Json *each = schema.find("items"), *own = schema.find("prefixItems");
  for (size_t i = 0; i < value.items().size(); i++) {
    const Json* form = own ? &own->items()[i] : each;
    if (form) check(*form, value.items()[i], below(at, std::to_string(i)), faults);
  }
}

const Json& Schema::meant(const Json& schema, const Json& value) const {
  const Json* reference = schema.find("$ref");
  if (!reference) {
    const Json* choice = schema.find("discriminator");
    const Json* kind = choice ? value.find((*choice)["propertyName"].string()) : nullptr;
    bool named = kind && kind->is(Json::text);
    reference = named ? (*choice)["mapping"].find(kind->string()) : nullptr;
    if (!reference) return schema;
  }
  return root_["$defs"][reference->string().substr(std::strlen("#/$defs/"))];
}

void Schema::write(std::string& out, const Json& value, const char* name) const {
  write(out, value, root_["$defs"][name]);
}

const Json* Schema::fallback(const char* name, const char* key) const {
  return root_["$defs"][name]["properties"][key].find("default");
}

void Schema::write(std::string& out, const Json& value, const Json& given) const {
  const Json* schema = &given;
  while (schema->find("$ref") || schema->find("oneOf")) schema = &meant(*schema, value);
  if (const Json* choices = schema->find("anyOf")) {
    for (const Json& choice : choices->items()) {
      Faults found;
      check(choice, value, "", found);
      if (!found.count()) return write(out, value, choice);
    }
    return;
  }
  const Json* type = schema->find("type");
  if (type && type->string() == "number" && !value.infinite())
    return write_number(out, value.number());
  if (value.is(Json::array)) {
    const Json *each = schema->find("items"), *own = schema->find("prefixItems");
    out += '[';
    for (size_t i = 0; i < value.items().size(); i++) {
      if (i) out += ", ";
      write(out, value.items()[i], own ? own->items()[i] : *each);
    }
    out += ']';
    return;
  }
  const Json* known = schema->find("properties");
  if (!known) return write_json(out, value);
  std::vector<std::string> names = known->keys();
  std::sort(names.begin(), names.end());
  bool first = true;
  out += '{';
  for (const std::string& name : names) {
    const Json &form = (*known)[name], *given_value = value.find(name),
               *usual = form.find("default");
    const Json& said = given_value ? *given_value : *usual;
    const Json* later = schema->find("later");
    bool left_out = later && std::find(later->items().begin(), later->items().end(),
                                       Json::of(name)) != later->items().end();
    if (left_out && said == *usual) continue;
    if (!first) out += ", ";
    first = false;
    write_text(out, name);
    out += ": ";
    write(out, said, form);
  }
  out += '}';
}

}  // namespace edge_lib
