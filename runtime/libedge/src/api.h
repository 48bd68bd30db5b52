// What all functions of the C interface share. No exception leaves them.
#pragma once

#include <cxxabi.h>

#include <cstring>
#include <new>

#include "engine.h"

struct edge_bundle {
  std::shared_ptr<const edge_lib::OpenBundle> opened;
};

namespace edge_lib {

// Allocates nothing, because it also reports that memory ran out.
inline edge_status fail(edge_error* error, edge_status status, std::string_view message,
                        std::string_view file = "", std::string_view field = "") {
  if (error) {
    error->status = status;
    print(error->message, sizeof error->message, message);
    print(error->file, sizeof error->file, file);
    print(error->field, sizeof error->field, field);
  }
  return status;
}

template <class F>
edge_status guarded(edge_error* error, F work) {
  try {
    work();
    if (error) *error = {};
    return EDGE_OK;
  } catch (const Fault& fault) {
    return fail(error, fault.status, fault.message, fault.file, fault.field);
  } catch (const std::bad_alloc&) {
    return fail(error, EDGE_ERROR_MEMORY, "not enough memory");
  } catch (const std::exception& problem) {
    return fail(error, EDGE_ERROR_ENGINE, problem.what());
#ifdef __GLIBCXX__
  } catch (const abi::__forced_unwind&) {
    throw;  // the thread is being cancelled, which is not an error
#endif
  } catch (...) {  // thrown by a callback
    return fail(error, EDGE_ERROR_ENGINE, "the callback threw an exception");
  }
}

template <class T>
T& given(T* pointer, const char* name) {
  if (!pointer) throw Fault{EDGE_ERROR_INPUT, "is NULL", "", name};
  return *pointer;
}

// Structures grow at their end, so a program compiled with an older header passes fewer fields.
template <class T>
void check_size(const T* value, const char* name) {
  if (value->size < sizeof value->size || value->size > sizeof(T))
    throw Fault{EDGE_ERROR_INPUT,
                "has a size that this version does not know: initialize it with its macro", "",
                name};
}
template <class T>
T taken(const T* options, T usual, const char* name) {
  if (!options) return usual;
  check_size(options, name);
  std::memcpy(&usual, options, options->size);
  usual.size = sizeof(T);
  return usual;
}
template <class T>
void give(T* target, T found, const char* name) {
  check_size(&given(target, name), name);
  found.size = target->size;
  std::memcpy(target, &found, target->size);
}

}  // namespace edge_lib
