// Kernels: made once from a variant of a launch plan, then run with the values of launches.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "pool.h"

namespace edge_cpu {

// Whether the compiler knows products of int8 matrices, the set `i8mm`.
#if defined(__aarch64__) && (__clang_major__ >= 11 || __GNUC__ >= 10)
#define EDGE_COMPILES_I8MM 1
#endif

// Always inlined: the linker might keep a separate copy for machines without its instructions.
#define EDGE_INLINE __attribute__((always_inline)) inline

// IEEE 754 binary16, converted without special instructions.
struct Half {
  uint16_t bits;
};
float half_value(uint16_t bits);
uint16_t half_bits(float value);  // nearest, ties to even

// One argument of a launch: an address, an integer or a float, by the variant's types.
union Value {
  void* address;
  int64_t integer;
  float number;
};

enum class Type { none, f32, f16, i8, u8, i32, i64 };

// A variant: a launch's arguments, their types, and the constants. Names are plain C strings: see
// std.h.
class Variant {
 public:
  // `text` has a line for each: "kernel NAME", "argument NAME TYPE", "constant NAME [VALUE]".
  explicit Variant(const char* text);
  ~Variant();
  Variant(const Variant&) = delete;

  const char* kernel() const;
  bool knows(const char* name) const;  // as an argument or a constant
  // Position of an argument, -1 if it is None. Throws if the variant does not have it.
  int at(const char* name) const;
  Type type(const char* name) const;
  int64_t integer(const char* name) const;
  int64_t integer(const char* name, int64_t otherwise) const;
  // An integer checked against a range: for divisors and array sizes.
  int64_t within(const char* name, int64_t least, int64_t most = int64_t(1) << 31) const;
  double number(const char* name) const;
  double number(const char* name, double otherwise) const;

 private:
  struct Told;
  Told* told_;
};

// Refuses the variant: throws from a kernel's constructor.
[[noreturn]] void refuse(const char* why);

// An argument by name: `x.in<float>(values)`. Throws if it is None; an optional one may be None or
// missing from the variant.
class Argument {
 public:
  Argument(const Variant& v, const char* name);
  EDGE_INLINE explicit operator bool() const { return at_ >= 0; }
  int place() const { return at_; }
  template <class T> EDGE_INLINE T* in(const Value* values) const {
    return at_ < 0 ? nullptr : static_cast<T*>(values[at_].address);
  }
  EDGE_INLINE int64_t integer(const Value* values) const { return values[at_].integer; }
  static Argument optional(const Variant& v, const char* name);

 private:
  Argument();
  int at_;

 public:
  const Type type;
};

// An argument whose rows a kernel can also read interleaved: in groups of `width` rows, each with
// word 0 of all its rows, then word 1 of all, … The last group has the remaining rows.
struct Interleaved {
  int argument;
  int64_t width, rows, words;  // rows 0: known only to other readers
  int word;                    // bytes per word: 2 or 4
};

struct Kernel {
  virtual ~Kernel() = default;
  // Writes the arguments worth interleaving, at most 3, to `out`. Returns their number.
  virtual int interleavable(Interleaved*) const { return 0; }
  // From now on they are interleaved. Arguments with `rows` 0 have this number of rows.
  void interleave(int64_t rows) { interleaved = rows; }
  int64_t interleaved = 0;
  bool tiles = false;  // whether AMX tiles may be used
  // `grid` is the launch grid on a GPU: kernels read sizes from it that no argument gives. Throws
  // only if there is no memory: unsupported variants are refused when the kernel is made.
  virtual void run(const Value* values, const int64_t* grid, Pool& pool) const = 0;
  // The same for several states, at most 16, with one grid: `each` has the addresses of their
  // values. Each gets the bits of a separate run.
  virtual void run_all(const Value* each, int64_t states, const int64_t* grid, Pool& pool) const {
    for (int64_t i = 0; i < states; i++)
      run(static_cast<const Value*>(each[i].address), grid, pool);
  }
};

// An argument that is a tensor of f32, f16 or int8. Throws for other types.
Argument numbers(const Variant& v, const char* name);
Argument optional_numbers(const Variant& v, const char* name);

// Calls `f` with a null pointer to the element type `type`, one of those of `numbers`.
template <class F> void with_type(Type type, F f) {
  switch (type) {
    case Type::f16: return f((Half*)nullptr);
    case Type::i8: return f((int8_t*)nullptr);
    default: return f((float*)nullptr);
  }
}

// Fields of the input `run` (edge/launch.py, RUN_FIELDS).
enum { PENDING, ADVANCE, SOURCE, TARGET, STORE, PAST };

using Maker = Kernel* (*)(const Variant&);

template <class K> Kernel* make(const Variant& v) { return new K(v); }

}  // namespace edge_cpu
