// All kernels for one instruction set: included by each isa_*.cpp after its choice of target.
namespace edge_cpu {
#ifdef EDGE_ISA_REST
namespace EDGE_ISA_REST {
Maker find(const char* name);
}
#endif
namespace EDGE_ISA {

// Kernel files end with lines KERNEL(name, type), where the name is that of launch plans. They
// become constants: no code of this file may run before the machine is known to have the
// instructions, so there must be no initialisers.
constexpr int FIRST = __COUNTER__ + 1;
template <int> struct Entry;
#define KERNEL(NAME, TYPE)                       \
  template <> struct Entry<__COUNTER__ - FIRST> { \
    static constexpr const char* name = NAME;    \
    static constexpr Maker maker = make<TYPE>;   \
  };

#include "simd.h"
#include "rows.h"
#include "state.h"

#include "../../linear/cpu_panel.h"
#include "../../linear/cpu_tiles.h"
#include "../../standard/cpu.h"

// Kernels that use no int8 product: those are below, and `dot` of simd.h. A set that differs from
// another in its products alone takes these kernels from that one.
#ifndef EDGE_ISA_REST
#include "../../argmax/cpu.h"
#include "../../attention/cpu.h"
#include "../../expand_logits/cpu.h"
#include "../../gelu/cpu.h"
#include "../../group_norm/cpu.h"
#include "../../multiply/cpu.h"
#include "../../norm/cpu.h"
#include "../../quantize/cpu.h"
#include "../../soft_cap/cpu.h"
#include "../../squared_relu/cpu.h"
// these use the kernels above
#include "../../hadamard/cpu.h"
#include "../../gated_delta_rule/cpu.h"
#include "../../gated_norm/cpu.h"
#include "../../selective_scan_heads/cpu.h"
#include "../../selective_scan_heads/cpu_chunks.h"
#endif

#include "../../linear/cpu.h"
#include "../../linear/cpu_float.h"
// these use the products above
#include "../../causal_conv1d/cpu.h"
#include "../../linear/cpu_bits.h"
#include "../../embedding/cpu.h"
#include "../../experts/cpu.h"
#include "../../selective_scan/cpu.h"

constexpr int KERNELS = __COUNTER__ - FIRST;

template <int I> Maker find_from(const char* name) {
  if constexpr (I < KERNELS)
    return std::strcmp(name, Entry<I>::name) ? find_from<I + 1>(name) : Entry<I>::maker;
#ifdef EDGE_ISA_REST
  return EDGE_ISA_REST::find(name);
#else
  return nullptr;
#endif
}
// Returns the maker of the kernel of that name, or null.
Maker find(const char* name) { return find_from<0>(name); }

}  // namespace EDGE_ISA
}  // namespace edge_cpu
