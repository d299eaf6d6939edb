// thread.h: threads for the C++ tests. Like std::thread, but they take part in the clock of check.h from
// their start on, and so does who joins them. Include after check.h.

#ifndef THREAD_H
#define THREAD_H

#include <functional>
#include <memory>
#include <utility>

class Thread {
 public:
  explicit Thread(std::function<void()> body) : state_(new State) {
    state_->body = std::move(body);
    start_thread(&state_->thread, run, state_.get());
  }

  void join() { join_thread(&state_->thread); }

 private:
  // Stays where it is when the thread's object is moved.
  struct State {
    check_thread thread;
    std::function<void()> body;
  };

  static void *run(void *state) {
    static_cast<State *>(state)->body();
    return nullptr;
  }

  std::unique_ptr<State> state_;
};

#endif  // THREAD_H
