// Reads allocation traces, gzip-compressed or plain text, for the demo and the benchmarks:
//
//   # comment
//   a <id> <bytes> [stream]   a block is allocated
//   f <id>                    it is freed
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

extern char **environ;

namespace trace {

struct Event {
  uint64_t size;    // bytes of the block, for its free too
  uint32_t block;   // dense index; reused once the block is free
  uint16_t stream;  // dense index of the stream it is allocated on
  bool is_free;
};

struct Trace {
  std::string name;
  std::vector<Event> events;
  uint32_t slots = 0;      // block indexes are below this
  uint32_t streams = 0;    // stream indexes are below this
  uint64_t blocks = 0;     // allocations in the trace
  uint64_t live_peak = 0;  // largest sum of the sizes of live blocks, in bytes
};

inline std::runtime_error failure(const std::string &what) {
  return std::runtime_error(what);
}

// Runs `argv` and takes all that it writes to its standard output; false where there is no such
// program.
inline bool output_of(const std::vector<std::string> &argv, std::string *output) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw failure("pipe: " + std::string(strerror(errno)));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  std::vector<char *> args;
  for (const std::string &arg : argv) args.push_back(const_cast<char *>(arg.c_str()));
  args.push_back(nullptr);
  pid_t child = 0;
  const int error = posix_spawnp(&child, args[0], &actions, nullptr, args.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  output->clear();
  char buffer[1 << 16];
  ssize_t got = 0;
  while (error == 0 && (got = read(ends[0], buffer, sizeof buffer)) != 0) {
    if (got > 0) output->append(buffer, static_cast<size_t>(got));
    else if (errno != EINTR) break;
  }
  close(ends[0]);
  if (error == ENOENT) return false;
  if (error != 0) throw failure(argv[0] + ": " + strerror(error));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) throw failure(argv[0] + " died: " + strsignal(WTERMSIG(status)));
  if (status != 0) throw failure(argv[0] + " failed on " + argv.back());
  return true;
}

// The text of a file. Decompressing is left to a program: a bare machine has gzip or Python, but
// not zlib's headers.
inline std::string text_of(const std::string &path) {
  const std::string suffix = ".gz";
  const bool zipped = path.size() > suffix.size() &&
                      path.compare(path.size() - suffix.size(), suffix.size(), suffix) == 0;
  if (access(path.c_str(), R_OK) != 0) throw failure(path + ": " + strerror(errno));
  if (!zipped) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  std::string text;
  const char *unzip = "import gzip,shutil,sys;"
                      "shutil.copyfileobj(gzip.open(sys.argv[1]),sys.stdout.buffer)";
  if (!output_of({"gzip", "-dc", "--", path}, &text) &&
      !output_of({"python3", "-c", unzip, path}, &text)) {
    throw failure("neither gzip nor python3 is there to read " + path);
  }
  return text;
}

// One line of a trace, cut into numbers.
class Line {
 public:
  Line(const char *begin, const char *end) : at_(begin), end_(end) {}

  bool number(uint64_t *value) {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r')) ++at_;
    const std::from_chars_result result = std::from_chars(at_, end_, *value);
    at_ = result.ptr;
    return result.ec == std::errc();
  }

 private:
  const char *at_;
  const char *end_;
};

// Reads a trace whole, checks it and turns ids and streams into dense indexes.
inline Trace load(const std::string &path) {
  Trace trace;
  trace.name = path.substr(path.rfind('/') + 1);
  trace.name = trace.name.substr(0, trace.name.find(".trace"));
  const std::string text = text_of(path);
  struct Live {
    uint32_t slot;
    uint16_t stream;
    uint64_t size;
  };
  std::unordered_map<uint64_t, Live> live;
  std::vector<uint32_t> idle_slots;
  std::map<uint64_t, uint16_t> streams;
  uint64_t live_bytes = 0;
  size_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const char kind = text[at];
    Line line(text.data() + std::min(at + 1, end), text.data() + end);
    at = end + 1;
    ++number;
    if (kind == '#' || kind == '\n') continue;
    const auto wrong = [&](const char *why) {
      return failure(path + ":" + std::to_string(number) + ": " + why);
    };
    uint64_t id = 0;
    if ((kind != 'a' && kind != 'f') || !line.number(&id)) {
      throw wrong("neither a nor f with an id");
    }
    if (kind == 'a') {
      Live block{trace.slots, 0, 0};
      if (!line.number(&block.size)) throw wrong("an allocation without a size");
      uint64_t stream = 0;
      if (!line.number(&stream)) stream = 0;
      if (streams.size() > UINT16_MAX) throw wrong("too many streams");
      block.stream = streams.emplace(stream, static_cast<uint16_t>(streams.size())).first->second;
      if (idle_slots.empty()) {
        ++trace.slots;
      } else {
        block.slot = idle_slots.back();
        idle_slots.pop_back();
      }
      if (!live.emplace(id, block).second) throw wrong("the id is live already");
      live_bytes += block.size;
      trace.live_peak = std::max(trace.live_peak, live_bytes);
      ++trace.blocks;
      trace.events.push_back({block.size, block.slot, block.stream, false});
    } else {
      const auto found = live.find(id);
      if (found == live.end()) throw wrong("a free of an id that is not live");
      const Live block = found->second;
      live.erase(found);
      idle_slots.push_back(block.slot);
      live_bytes -= block.size;
      trace.events.push_back({block.size, block.slot, block.stream, true});
    }
  }
  trace.streams = static_cast<uint32_t>(streams.size());
  if (trace.events.empty()) throw failure(path + ": no events");
  return trace;
}

// The traces that a path names: itself, or every trace in it where it is a folder, by name.
inline std::vector<std::string> find(const std::string &path) {
  DIR *folder = opendir(path.c_str());
  if (folder == nullptr) return {path};
  std::vector<std::string> found;
  while (const dirent *entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name.find(".trace") != std::string::npos) found.push_back(path + "/" + name);
  }
  closedir(folder);
  std::sort(found.begin(), found.end());
  return found;
}

// The traces that a command line names, and the headroom if it gives one. None: it was wrong, and
// that has been said.
inline std::vector<std::string> arguments(int argc, char **argv, double *headroom) {
  std::vector<std::string> paths;
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--headroom") == 0 && i + 1 < argc) {
      *headroom = strtod(argv[++i], nullptr);
      continue;
    }
    const std::vector<std::string> found = find(argv[i]);
    paths.insert(paths.end(), found.begin(), found.end());
  }
  if (paths.empty()) fprintf(stderr, "usage: %s [--headroom FACTOR] TRACE|FOLDER...\n", argv[0]);
  return paths;
}

}  // namespace trace
