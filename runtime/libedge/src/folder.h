// Files of a folder, opened without following symbolic links and read completely.
#pragma once

#include <functional>
#include <set>
#include <string>

#include "fault.h"

namespace edge_lib {

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) : fd_(other.fd_) { other.fd_ = -1; }
  Descriptor& operator=(Descriptor&& other);
  ~Descriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

// The message for errno.
std::string reason();

// Returns why `path` is not a plain relative path, or "".
std::string not_relative(const std::string& path);

class Folder {
 public:
  explicit Folder(const std::string& path);  // throws Fault
  const std::string& path() const { return path_; }
  // Opens a regular file in the folder. Throws Fault.
  Descriptor open(const std::string& relative) const;
  // Returns the relative paths of everything in it but folders, recursively. Throws Fault.
  std::set<std::string> files() const;

 private:
  std::string path_;
  Descriptor fd_;
};

// Returns the size of an open file in bytes, -1 on errors.
int64_t size_of(const Descriptor& file);
// Returns whether less than half of a file of at least 1 GiB was ever written; edge/bundle/files.py
// says how it is told. Moves the descriptor's own offset, which nothing here reads by.
bool is_mostly_holes(const Descriptor& file, int64_t size);
// Reads `size` bytes at offset `at`. Throws a Fault of `status` on disk errors or too few bytes.
void read_at(const Descriptor& file, int64_t at, char* out, size_t size, edge_status status,
             const std::string& name);
// Passes the first `size` bytes to `take` in blocks. Throws Fault on disk errors or too few bytes.
void read_blocks(const Descriptor& file, int64_t size, const std::string& name,
                 const std::function<void(const char*, size_t)>& take);

}  // namespace edge_lib
