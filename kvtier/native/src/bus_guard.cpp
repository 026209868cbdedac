#include "bus_guard.hpp"

#include <csetjmp>
#include <csignal>

#include <atomic>
#include <mutex>

namespace kvtier {

namespace {

struct Guard {
  std::uintptr_t begin;
  std::uintptr_t end;
  sigjmp_buf escape;
};

// Static storage of the thread: the handler runs on threads that never came here too, and may not allocate.
thread_local Guard* volatile active __attribute__((tls_model("initial-exec"))) = nullptr;

using Handler = void (*)(int, siginfo_t*, void*);

// Who is asked about any other SIGBUS: stored before ours is in place.
std::atomic<Handler> before{nullptr};
std::atomic<bool> before_takes_details{false};
std::atomic<bool> before_ignores{false};
std::atomic_flag passing_on = ATOMIC_FLAG_INIT;

static_assert(std::atomic<Handler>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

bool is_of_the_access(const siginfo_t* details) { return details->si_code > 0 && details->si_code != BUS_MCEERR_AO; }

void end_process(int number, const siginfo_t* details) {
  struct sigaction plain {};
  plain.sa_handler = SIG_DFL;
  sigaction(number, &plain, nullptr);
  if (!is_of_the_access(details)) raise(number);  // the access will fail again by itself
}

void on_bus_error(int number, siginfo_t* details, void* context);
void on_bus_error_meanwhile(int number, siginfo_t* details, void* context);

bool is_in_place(Handler handler) {
  struct sigaction now {};
  return sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == handler;
}

void put_in_place(Handler handler) {
  struct sigaction ours {};
  ours.sa_sigaction = handler;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

// Asks the handler that was there before. One that is done with the process (Python's faulthandler) puts back what it found,
// which is us where it came after us, and signals again: so another of our faces is in place meanwhile, and where the first
// one is back afterwards the process ends.
void ask(Handler handler, int number, siginfo_t* details, void* context) {
  put_in_place(&on_bus_error_meanwhile);
  if (before_takes_details.load()) {
    handler(number, details, context);
  } else {
    reinterpret_cast<void (*)(int)>(handler)(number);
  }
  if (is_in_place(&on_bus_error)) {
    end_process(number, details);
  } else if (is_in_place(&on_bus_error_meanwhile)) {
    put_in_place(&on_bus_error);
  }
}

void pass_on(int number, siginfo_t* details, void* context) {
  const Handler handler = before.load();
  if (handler == nullptr) {
    if (before_ignores.load() && !is_of_the_access(details)) return;
    end_process(number, details);
  } else if (passing_on.test_and_set()) {
    end_process(number, details);  // whom we asked asks us
  } else {
    ask(handler, number, details, context);
    passing_on.clear();
  }
}

void leave_if_guarded(const siginfo_t* details) {
  Guard* const guard = active;
  const auto at = reinterpret_cast<std::uintptr_t>(details->si_addr);
  if (guard != nullptr && is_of_the_access(details) && at >= guard->begin && at < guard->end) {
    siglongjmp(guard->escape, 1);
  }
}

void on_bus_error(int number, siginfo_t* details, void* context) {
  leave_if_guarded(details);
  pass_on(number, details, context);
}

void on_bus_error_meanwhile(int number, siginfo_t* details, void* context) {
  leave_if_guarded(details);
  pass_on(number, details, context);
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 &&
         (action.sa_sigaction == &on_bus_error || action.sa_sigaction == &on_bus_error_meanwhile);
}

void take_over() {
  struct sigaction now {};
  if (sigaction(SIGBUS, nullptr, &now) != 0 || is_ours(now)) return;
  static std::mutex turn;
  const std::lock_guard<std::mutex> held(turn);
  if (sigaction(SIGBUS, nullptr, &now) != 0 || is_ours(now)) return;
  const bool takes_details = (now.sa_flags & SA_SIGINFO) != 0;
  const bool is_plain = !takes_details && (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN);
  before_ignores.store(is_plain && now.sa_handler == SIG_IGN);
  before_takes_details.store(takes_details);
  before.store(is_plain ? nullptr : now.sa_sigaction);
  put_in_place(&on_bus_error);
}

}  // namespace

bool run_guarded(const std::uint8_t* begin, std::size_t size, void (*work)(void*), void* argument) {
  take_over();
  const auto at = reinterpret_cast<std::uintptr_t>(begin);
  Guard guard{at, at + size, {}};
  if (sigsetjmp(guard.escape, 1) != 0) {
    active = nullptr;
    return false;
  }
  active = &guard;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  work(argument);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  active = nullptr;
  return true;
}

}  // namespace kvtier
