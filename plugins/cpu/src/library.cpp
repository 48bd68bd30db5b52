// The functions of calls.h: making kernels from variants, and running lists of launches.
#include <algorithm>
#include <charconv>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "calls.h"
#include "interleave.h"
#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace edge_cpu {

namespace plain {
Maker find(const char* name);
}
#if defined(__x86_64__)
namespace avx2 {
Maker find(const char* name);
}
namespace avxvnni {
Maker find(const char* name);
}
namespace avx512 {
Maker find(const char* name);
}
#elif defined(__aarch64__)
namespace dotprod {
Maker find(const char* name);
}
#if EDGE_COMPILES_I8MM
namespace i8mm {
Maker find(const char* name);
}
#endif
#endif

float half_value(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, rest = bits & 0x3ff;
  float value;
  if (exponent == 0) {
    value = std::ldexp(float(rest), -24);
    return sign ? -value : value;
  }
  uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | rest << 13;
  std::memcpy(&value, &wide, 4);
  return value;
}

uint16_t half_bits(float value) {
  uint32_t wide;
  std::memcpy(&wide, &value, 4);
  uint16_t sign = uint16_t(wide >> 16 & 0x8000);
  uint32_t size = wide & 0x7fffffff;
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and above
  if (size < 0x38800000) {                                 // below the smallest normal number
    float small;
    std::memcpy(&small, &size, 4);
    return uint16_t(sign | uint16_t(std::nearbyintf(std::ldexp(small, 24))));
  }
  uint32_t even = size + 0xfff + (size >> 13 & 1);
  return uint16_t(sign | uint16_t((even - 0x38000000) >> 13));
}

// -- variants ---------------------------------------------------------------------------------------

// Bound of a constant, far beyond any memory: sums and small multiples do not overflow.
constexpr int64_t LARGEST = int64_t(1) << 48;

struct Variant::Told {
  std::string kernel;
  std::map<std::string, std::pair<int, std::string>> arguments;
  std::map<std::string, std::string> constants;

  [[noreturn]] void missing(const char* name) const {
    throw std::runtime_error(std::string("the variant lacks ") + name);
  }
  const std::string& constant(const char* name) const {
    auto found = constants.find(name);
    if (found == constants.end()) missing(name);
    return found->second;
  }
};

Argument::Argument() : at_(-1), type(Type::none) {}
Argument::Argument(const Variant& v, const char* name) : at_(v.at(name)), type(v.type(name)) {
  if (at_ < 0) throw std::runtime_error(std::string(name) + " is None");
}
Argument Argument::optional(const Variant& v, const char* name) {
  return !v.knows(name) || v.at(name) < 0 ? Argument() : Argument(v, name);
}

Argument optional_numbers(const Variant& v, const char* name) {
  Argument x = Argument::optional(v, name);
  if (x && x.type != Type::f32 && x.type != Type::f16 && x.type != Type::i8)
    throw std::runtime_error(std::string(name) + " has a type that no kernel takes");
  return x;
}
Argument numbers(const Variant& v, const char* name) {
  Argument(v, name);
  return optional_numbers(v, name);
}

void refuse(const char* why) { throw std::runtime_error(why); }

Variant::Variant(const char* text) : told_(new Told) {
  std::istringstream lines(text);
  std::string line, what, name, value;
  int position = 0;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    value.clear();
    words >> what >> name >> value;
    if (what == "kernel")
      told_->kernel = name;
    else if (what == "argument")
      told_->arguments[name] = {position++, value};
    else
      told_->constants[name] = value;
  }
}
Variant::~Variant() { delete told_; }

const char* Variant::kernel() const { return told_->kernel.c_str(); }

bool Variant::knows(const char* name) const {
  return told_->arguments.count(name) || told_->constants.count(name);
}

int Variant::at(const char* name) const {
  auto found = told_->arguments.find(name);
  if (found != told_->arguments.end()) return found->second.first;
  if (!told_->constant(name).empty()) told_->missing(name);
  return -1;
}

Type Variant::type(const char* name) const {
  auto found = told_->arguments.find(name);
  if (found == told_->arguments.end()) return Type::none;
  std::string kind = found->second.second.substr(0, found->second.second.find(':'));
  static const std::map<std::string, Type> types = {
      {"*fp32", Type::f32}, {"fp32", Type::f32}, {"*fp16", Type::f16}, {"*i8", Type::i8},
      {"*u8", Type::u8},    {"*i32", Type::i32}, {"i32", Type::i32},   {"*i64", Type::i64},
      {"i64", Type::i64},
  };
  auto known = types.find(kind);
  if (known == types.end())
    throw std::runtime_error(std::string(name) + " has the unknown type " + kind);
  return known->second;
}

int64_t Variant::integer(const char* name) const {
  const std::string& text = told_->constant(name);
  if (text.empty()) return 0;
  int64_t value = 0;
  auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (fault != std::errc() || end != text.data() + text.size() || value < -LARGEST || value > LARGEST)
    throw std::runtime_error(std::string(name) + " is not a size: " + text.substr(0, 40));
  return value;
}

int64_t Variant::integer(const char* name, int64_t otherwise) const {
  return told_->constants.count(name) ? integer(name) : otherwise;
}

int64_t Variant::within(const char* name, int64_t least, int64_t most) const {
  int64_t value = integer(name);
  if (value < least || value > most)
    throw std::runtime_error(std::string(name) + " must be " + std::to_string(least) + " to " +
                             std::to_string(most) + ", is " + std::to_string(value));
  return value;
}

double Variant::number(const char* name) const {
  const std::string& text = told_->constant(name);
  double value = 0;
  // not stod, which depends on the program's locale
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc())
    throw std::runtime_error(std::string(name) + " is not a number: " + text);
  return value;
}

double Variant::number(const char* name, double otherwise) const {
  return told_->constants.count(name) ? number(name) : otherwise;
}

// -- instruction sets -------------------------------------------------------------------------------

constexpr const char* TILES = "amx";

struct Isa {
  const char* name;
  bool here;
  Maker (*find)(const char*);
};

#if defined(__x86_64__)
// Return whether the machine has AMX for int8 and the kernel lets this process use it.
static bool has_tiles() {
#if defined(__linux__) && (__clang_major__ >= 12 || __GNUC__ >= 11)
  uint32_t a = 7, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (!(d >> 24 & 1) || !(d >> 25 & 1)) return false;
  const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}
#endif

// Best last. `amx` is `avx512` with tiles.
static std::vector<Isa> sets() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512vnni");
  uint32_t a = 7, b = 0, c = 1, d = 0;
  if (avx2) asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  bool avxvnni = avx2 && (a >> 4 & 1);
  static const bool amx = avx512 && has_tiles();
  return {{"plain", true, plain::find},
          {"avx2", avx2, avx2::find},
          {"avxvnni", avxvnni, avxvnni::find},
          {"avx512", avx512, avx512::find},
          {TILES, amx, avx512::find}};
#elif defined(__aarch64__)
  bool products = getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#if EDGE_COMPILES_I8MM
  bool matrices = products && (getauxval(AT_HWCAP2) >> 13 & 1);  // HWCAP2_I8MM
#endif
  return {{"plain", true, plain::find},
          {"dotprod", products, dotprod::find},
#if EDGE_COMPILES_I8MM
          {"i8mm", matrices, i8mm::find},
#endif
  };
#else
  return {{"plain", true, plain::find}};
#endif
}

// -- copies and fills -------------------------------------------------------------------------------

struct Copy : Kernel {
  void run(const Value* a, const int64_t* size, Pool&) const override {
    std::memcpy(a[0].address, a[1].address, size_t(size[0]));
  }
};
struct Fill : Kernel {
  void run(const Value* a, const int64_t* size, Pool&) const override {
    std::memset(a[0].address, int(size[1]), size_t(size[0]));
  }
};

}  // namespace edge_cpu

using namespace edge_cpu;

extern "C" {

int edge_cpu_version() { return 7; }

int edge_cpu_sets(char* out, int size) {
  std::string names;
  for (const Isa& set : sets())
    if (set.here) names += (names.empty() ? "" : " ") + std::string(set.name);
  std::snprintf(out, size_t(size), "%s", names.c_str());
  return int(names.size());
}

int edge_cpu_pinnable() {
  try {
    return pinnable();
  } catch (...) {
    return 0;
  }
}
void* edge_cpu_pool(int threads, int finest, int pin) {
  try {
    return new Pool(std::max(1, threads), finest != 0, pin != 0);
  } catch (...) {
    return nullptr;
  }
}
void edge_cpu_pool_free(void* pool) { delete static_cast<Pool*>(pool); }
int edge_cpu_level(void* pool) {
  try {
    static_cast<Pool*>(pool)->level();
    return 0;
  } catch (...) {
    return 1;
  }
}

void* edge_cpu_kernel(const char* set, const char* text, char* problem, int size) {
  std::string kernel;
  try {
    Variant variant{text};
    kernel = variant.kernel();
    if (kernel == "copy") return new Copy;
    if (kernel == "fill") return new Fill;
    for (const Isa& each : sets()) {
      if (!each.here || std::string(each.name) != set) continue;
      Maker maker = each.find(kernel.c_str());
      if (!maker) throw std::runtime_error("there is no such CPU kernel");
      Kernel* made = maker(variant);
      made->tiles = std::strcmp(set, TILES) == 0;
      return made;
    }
    throw std::runtime_error(std::string("this machine has no ") + set);
  } catch (const std::exception& error) {
    std::snprintf(problem, size_t(size), "%s: %s", kernel.c_str(), error.what());
    return nullptr;
  }
}
void edge_cpu_kernel_free(void* kernel) { delete static_cast<Kernel*>(kernel); }

int edge_cpu_interleave(const EdgeCpuReader* readers, int64_t count) {
  try {
    interleave(readers, count);
    return 0;
  } catch (const std::length_error&) {
    return 2;
  } catch (...) {
    return 1;
  }
}
void edge_cpu_read_alike(void* kernel, const void* other) {
  static_cast<Kernel*>(kernel)->interleave(static_cast<const Kernel*>(other)->interleaved);
}

int edge_cpu_run(void* pool, const EdgeCpuCall* calls, int64_t count) {
  try {
    for (int64_t i = 0; i < count; i++) {
      const EdgeCpuCall& call = calls[i];
      const Kernel& kernel = *static_cast<const Kernel*>(call.kernel);
      Pool& shared = *static_cast<Pool*>(pool);
      shared.tiles = kernel.tiles;
      if (call.states)
        kernel.run_all(call.values, call.states, call.grid, shared);
      else
        kernel.run(call.values, call.grid, shared);
    }
    return 0;
  } catch (...) {
    return 1;
  }
}
}
