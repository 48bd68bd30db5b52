// What kernels use of the standard library: read before a target is chosen, so that its inline
// functions are not compiled for instructions that another machine lacks. Of templates that is not
// enough: an instance made here may be the one that the linker keeps for all. So kernels use no
// containers and no strings; memory comes from pool.h.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernel.h"
#include "pool.h"
