// The standard headers of the kernels. They are included before a target is chosen, so that their
// inline functions are not compiled to instructions that some machines lack. That does not protect
// templates: the linker may keep a kernel's instance for the whole library. So kernels use no
// containers and no strings; memory comes from pool.h.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernel.h"
#include "pool.h"
