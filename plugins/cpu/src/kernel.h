// What a kernel is: made once from a variant of a launch plan, then run with the values of launches.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "pool.h"

namespace edge_cpu {

// Never an instance of its own, which the linker might keep for machines without its instructions.
#define EDGE_INLINE __attribute__((always_inline)) inline

// IEEE 754 binary16, where no instruction converts it.
struct Half {
  uint16_t bits;
};
float half_value(uint16_t bits);
uint16_t half_bits(float value);  // nearest, ties to even

// One argument of a launch, as the variant's types say: an address, an integer or a float.
union Value {
  void* address;
  int64_t integer;
  float number;
};

enum class Type { none, f32, f16, i8, u8, i32, i64 };

// A variant: which arguments a launch brings, of what types, and the constants. Names are plain C
// strings: see std.h.
class Variant {
 public:
  // `text` has a line for each: "kernel NAME", "argument NAME TYPE", "constant NAME [VALUE]".
  explicit Variant(const char* text);
  ~Variant();
  Variant(const Variant&) = delete;

  const char* kernel() const;
  bool knows(const char* name) const;  // as an argument or a constant
  // Position of an argument, -1 where it is None. Throws where the variant has never heard of it.
  int at(const char* name) const;
  Type type(const char* name) const;
  int64_t integer(const char* name) const;
  int64_t integer(const char* name, int64_t otherwise) const;
  double number(const char* name) const;

 private:
  struct Told;
  Told* told_;
};

[[noreturn]] void refuse(const char* why);

// An argument by name: `x.in<float>(values)`.
class Argument {
 public:
  Argument(const Variant& v, const char* name);
  EDGE_INLINE explicit operator bool() const { return at_ >= 0; }
  template <class T> EDGE_INLINE T* in(const Value* values) const {
    return at_ < 0 ? nullptr : static_cast<T*>(values[at_].address);
  }
  EDGE_INLINE int64_t integer(const Value* values) const { return values[at_].integer; }
  static Argument none();

 private:
  Argument();
  int at_;

 public:
  const Type type;
};

struct Kernel {
  virtual ~Kernel() = default;
  // `grid` is what a GPU would be launched with: a kernel reads from it what nothing else says.
  virtual void run(const Value* values, const int64_t* grid, Pool& pool) const = 0;
};

// Calls `f` with a null pointer of the element type that `type` names.
template <class F> void with_type(Type type, F f) {
  switch (type) {
    case Type::f32: return f((float*)nullptr);
    case Type::f16: return f((Half*)nullptr);
    case Type::i8: return f((int8_t*)nullptr);
    default: refuse("a tensor of a type that no kernel takes");
  }
}

// Fields of the input `run` (edge/launch.py, RUN_FIELDS).
enum { PENDING, ADVANCE, SOURCE, TARGET, STORE, PAST };

using Maker = Kernel* (*)(const Variant&);

template <class K> Kernel* make(const Variant& v) { return new K(v); }

}  // namespace edge_cpu
