#include "folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

namespace edge_lib {

namespace {

constexpr size_t LONGEST = 255;
constexpr int64_t BLOCK = 1 << 20;
constexpr int DEEPEST = 8;
constexpr int64_t MAY_BE_HOLES = 1 << 30;
constexpr int PLACES = 256;

void walk(int folder, const std::string& prefix, int depth, std::set<std::string>& found) {
  if (depth > DEEPEST) throw Fault{EDGE_ERROR_BUNDLE, "nests folders more than 8 deep", prefix, ""};
  // a descriptor with its own read position; that of `folder` may be at the end
  int own = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* entries = own < 0 ? nullptr : fdopendir(own);
  if (!entries) {
    std::string why = reason();
    if (own >= 0) close(own);
    throw Fault{EDGE_ERROR_BUNDLE, "cannot be read: " + why, prefix, ""};
  }
  struct Closed {
    DIR* entries;
    ~Closed() { closedir(entries); }
  } closed{entries};
  while (const dirent* entry = readdir(entries)) {
    std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    struct stat info;
    if (fstatat(own, name.c_str(), &info, AT_SYMLINK_NOFOLLOW)) continue;
    if (!S_ISDIR(info.st_mode)) {
      found.insert(prefix + name);
      continue;
    }
    Descriptor below(
        openat(own, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (below.get() < 0)
      throw Fault{EDGE_ERROR_BUNDLE, "cannot be read: " + reason(), prefix + name, ""};
    walk(below.get(), prefix + name + "/", depth + 1, found);
  }
}

}  // namespace

std::string reason() {
  char text[128];
  // glibc's version, which may return a constant string instead of filling `text`
  return strerror_r(errno, text, sizeof text);
}

Descriptor& Descriptor::operator=(Descriptor&& other) {
  std::swap(fd_, other.fd_);
  return *this;
}
Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

std::string not_relative(const std::string& path) {
  if (path.empty() || path.size() > LONGEST)
    return "a path of " + std::to_string(path.size()) + " characters, 1 to 255 are allowed";
  for (char c : path)
    if (c < ' ' || c > '~' || c == '\\')
      return "has a backslash or an unprintable or non-ASCII character";
  for (size_t at = 0; at <= path.size();) {
    size_t end = std::min(path.find('/', at), path.size());
    std::string part = path.substr(at, end - at);
    if (part.empty() || part == "." || part == "..")
      return "leaves the folder or is not in plain form";
    at = end + 1;
  }
  return "";
}

Folder::Folder(const std::string& path)
    : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (fd_.get() < 0)
    throw Fault{EDGE_ERROR_BUNDLE, "is not a folder that can be opened: " + reason(), path, ""};
}

Descriptor Folder::open(const std::string& relative) const {
  std::string name = path_ + "/" + relative, wrong = not_relative(relative);
  if (!wrong.empty()) throw Fault{EDGE_ERROR_BUNDLE, wrong, path_, "files.path"};
  Descriptor at;
  int folder = fd_.get();
  for (size_t from = 0;;) {
    size_t end = relative.find('/', from);
    bool last = end == relative.npos;
    std::string part = relative.substr(from, last ? end : end - from);
    // O_NONBLOCK: opening a FIFO must not hang
    int how = O_RDONLY | O_NOFOLLOW | O_CLOEXEC | (last ? O_NONBLOCK : O_DIRECTORY);
    Descriptor next(openat(folder, part.c_str(), how));
    if (next.get() < 0)
      throw Fault{EDGE_ERROR_BUNDLE,
                  errno == ENOENT ? "is missing" : "cannot be opened as a plain file: " + reason(),
                  name, ""};
    at = std::move(next);
    folder = at.get();
    if (last) break;
    from = end + 1;
  }
  struct stat info;
  if (fstat(at.get(), &info) || !S_ISREG(info.st_mode))
    throw Fault{EDGE_ERROR_BUNDLE, "is not a regular file", name, ""};
  return at;
}

std::set<std::string> Folder::files() const {
  std::set<std::string> found;
  walk(fd_.get(), "", 0, found);
  return found;
}

int64_t size_of(const Descriptor& file) {
  struct stat info;
  return fstat(file.get(), &info) ? -1 : int64_t(info.st_size);
}

bool is_mostly_holes(const Descriptor& file, int64_t size) {
  if (size < MAY_BE_HOLES) return false;
  // not std::random_device: it would need a newer glibc than JetPack 6 has
  uint64_t random[PLACES / 8];
  int written = 0;
  for (int i = 0; i < PLACES; i++) {
    const int next = i % (PLACES / 8);
    if (next == 0 && getrandom(random, sizeof random, 0) != sizeof random) return false;
    int64_t place = int64_t(random[next] % uint64_t(size));
    off_t data = lseek(file.get(), place, SEEK_DATA);
    // ENXIO: no data up to the end; with other errors holes are unknown here
    written += data < 0 ? errno != ENXIO : data == place;
  }
  return written < PLACES / 2;
}

void read_at(const Descriptor& file, int64_t at, char* out, size_t size, edge_status status,
             const std::string& name) {
  while (size > 0) {
    ssize_t got = pread(file.get(), out, size, at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      throw Fault{status, got ? "cannot be read: " + reason() : "was cut short while it was read",
                  name, ""};
    out += got, at += got, size -= size_t(got);
  }
}

void read_blocks(const Descriptor& file, int64_t size, const std::string& name,
                 const std::function<void(const char*, size_t)>& take) {
  std::vector<char> block(size_t(std::min<int64_t>(size, BLOCK)));
  for (int64_t at = 0; at < size; at += BLOCK) {
    size_t count = size_t(std::min<int64_t>(size - at, BLOCK));
    read_at(file, at, block.data(), count, EDGE_ERROR_BUNDLE, name);
    take(block.data(), count);
  }
}

}  // namespace edge_lib
