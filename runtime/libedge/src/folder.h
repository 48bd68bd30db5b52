// Files of a folder: opened below it without following links, and read to the byte.
#pragma once

#include <functional>
#include <set>
#include <string>

#include "fault.h"

namespace edge_lib {

// A file descriptor that is closed with it.
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

// What errno says.
std::string reason();

// Why `path` is no plain relative path, or "".
std::string not_relative(const std::string& path);

class Folder {
 public:
  explicit Folder(const std::string& path);  // throws Fault
  const std::string& path() const { return path_; }
  // A regular file below it. Throws Fault.
  Descriptor open(const std::string& relative) const;
  // Paths of everything below that is no folder. Throws Fault.
  std::set<std::string> files() const;

 private:
  std::string path_;
  Descriptor fd_;
};

// Bytes of an open file.
int64_t size_of(const Descriptor& file);
// `size` bytes from `at` on. Throws Fault of `status`: the disk, or too few bytes.
void read_at(const Descriptor& file, int64_t at, char* out, size_t size, edge_status status,
             const std::string& name);
// Gives `size` bytes from the beginning in blocks. Throws Fault: the disk, or too few bytes.
void read_blocks(const Descriptor& file, int64_t size, const std::string& name,
                 const std::function<void(const char*, size_t)>& take);

}  // namespace edge_lib
