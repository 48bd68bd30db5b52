#include "replace.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "folder.h"

namespace edge_lib {

namespace {

void check(bool good) {
  if (!good) throw reason();
}

// A target file, and its temporary files `.NAME.saving-HEX`, each locked by its writer.
class Place {
 public:
  explicit Place(const std::string& path) : file_(path) {
    char real[PATH_MAX];
    if (realpath(path.c_str(), real)) file_ = real;  // a link is followed to its target
    size_t slash = file_.rfind('/');
    bool here = slash == file_.npos;
    folder_ = here ? "." : file_.substr(0, slash ? slash : 1);
    // a name has at most 255 bytes
    prefix_ = "." + (here ? file_ : file_.substr(slash + 1)).substr(0, 180) + ".saving-";
  }
  void check_regular() const {
    struct stat info;
    if (!lstat(file_.c_str(), &info) && !S_ISREG(info.st_mode))
      throw std::string("exists and is not a regular file");
  }
  const std::string& file() const { return file_; }
  const std::string& folder() const { return folder_; }

  std::string fresh() const {
    uint64_t random;
    check(getrandom(&random, sizeof random, 0) == sizeof random);
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(random));
    return folder_ + "/" + prefix_ + digits;
  }

  // Removes leftovers. Failures are ignored, since nothing depends on it.
  void sweep() const {
    DIR* entries = opendir(folder_.c_str());
    while (const dirent* entry = entries ? readdir(entries) : nullptr) {
      if (std::strncmp(entry->d_name, prefix_.c_str(), prefix_.size())) continue;
      const char* digits = entry->d_name + prefix_.size();  // other suffixes may be a user's files
      if (std::strlen(digits) != 16 || std::strspn(digits, "0123456789abcdef") != 16) continue;
      std::string left = folder_ + "/" + entry->d_name;
      Descriptor fd(open(left.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
      if (fd.get() >= 0 && !flock(fd.get(), LOCK_EX | LOCK_NB)) unlink(left.c_str());
    }
    if (entries) closedir(entries);
  }

 private:
  std::string file_, folder_, prefix_;
};

void write_all(int fd, const std::string& part) {
  for (size_t at = 0; at < part.size();) {
    ssize_t done = write(fd, part.data() + at, part.size() - at);
    if (done < 0 && errno == EINTR) continue;
    check(done >= 0);
    at += size_t(done);
  }
}

// Links the old file as NAME~, such that one exists at any time. On file systems without hard links
// no old file is kept, nor in the place of a pipe, a device or a folder. Retries if a sweep removes the temporary link as a leftover.
void keep(const Place& place) {
  struct stat info;
  std::string previous = place.file() + "~";
  if (!lstat(previous.c_str(), &info) && !S_ISREG(info.st_mode) && !S_ISLNK(info.st_mode)) return;
  for (bool swept = true; swept;) {
    std::string passing = place.fresh();
    if (linkat(AT_FDCWD, place.file().c_str(), AT_FDCWD, passing.c_str(), 0)) return;
    swept = rename(passing.c_str(), previous.c_str()) && errno == ENOENT;
    unlink(passing.c_str());  // a rename between two names of one file leaves both
  }
}

// Creates a temporary file, which no sweep removes while it is open.
Descriptor create(const Place& place, std::string& path) {
  for (;;) {
    path = place.fresh();
    Descriptor out(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    check(out.get() >= 0);
    if (flock(out.get(), LOCK_EX | LOCK_NB)) {
      if (errno == EWOULDBLOCK) continue;  // a sweep holds it
      return out;                          // no locks on this file system, so no sweep either
    }
    struct stat info;
    if (!lstat(path.c_str(), &info)) return out;  // else a sweep removed it before the lock
  }
}

}  // namespace

void replace_file(const std::string& path, const std::vector<const std::string*>& parts) {
  Place place(path);
  place.check_regular();
  place.sweep();
  std::string temporary;
  Descriptor out = create(place, temporary);
  try {
    for (const std::string* part : parts) write_all(out.get(), *part);
    check(!fsync(out.get()));
    keep(place);
    check(!rename(temporary.c_str(), place.file().c_str()));
  } catch (...) {
    unlink(temporary.c_str());
    throw;
  }
  Descriptor folder(open(place.folder().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  check(folder.get() >= 0 && !fsync(folder.get()));
}

void clear_leftovers(const std::string& path) { Place(path).sweep(); }

}  // namespace edge_lib
