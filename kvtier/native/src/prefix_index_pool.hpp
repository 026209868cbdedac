// Dense pools of fixed-size records in reserved address space: they grow in place without copying, a freed record is
// filled by the last one, and memory past the last record goes back to the system. So no allocator fragments between
// them, and the bytes counted are the bytes resident. What must not live here: what a record means.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace kvtier::index {

constexpr std::uint32_t NONE = 0xFFFFFFFFu;

// Granularity of memory that the system hands out.
inline std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Address space of one pool, reserved at first use. `touched` bytes from its start are (or were) written.
class Region {
 public:
  Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  Region(Region&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        reserved_(std::exchange(other.reserved_, 0)),
        committed_(std::exchange(other.committed_, 0)),
        touched_(std::exchange(other.touched_, 0)) {}
  Region& operator=(Region&&) = delete;
  ~Region() {
    if (base_ != nullptr) munmap(base_, reserved_);
  }

  std::uint8_t* base() const { return base_; }
  std::size_t touched() const { return touched_; }

  // Makes [0, bytes) usable. Throws std::bad_alloc.
  void grow(std::size_t bytes, std::size_t reserve) {
    if (bytes <= touched_) return;
    if (bytes > committed_) commit(bytes, reserve);
    touched_ = round_up(bytes);
  }

  // Gives back what lies past `bytes`, once that is more than `slack`.
  void shrink(std::size_t bytes, std::size_t slack) {
    const std::size_t keep = round_up(bytes);
    if (touched_ <= keep + slack) return;
#if defined(__linux__)
    if (madvise(base_ + keep, touched_ - keep, MADV_DONTNEED) != 0) return;
#else
    if (mmap(base_ + keep, touched_ - keep, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
      return;
#endif
    touched_ = keep;
  }

 private:
  static std::size_t round_up(std::size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

  void commit(std::size_t bytes, std::size_t reserve) {
    if (base_ == nullptr) {
      const std::size_t size = round_up(std::max(reserve, bytes));
      void* memory = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      base_ = static_cast<std::uint8_t*>(memory);
      reserved_ = size;
#if defined(MADV_NOHUGEPAGE)
      madvise(base_, reserved_, MADV_NOHUGEPAGE);  // a huge page would make resident what nobody wrote
#endif
    }
    if (bytes > reserved_) throw std::bad_alloc();
    const std::size_t step = std::clamp<std::size_t>(committed_ / 8, 64 << 10, 16 << 20);
    const std::size_t target = std::min(reserved_, round_up(std::max(bytes, committed_ + step)));
    if (mprotect(base_, target, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    committed_ = target;
  }

  std::uint8_t* base_ = nullptr;
  std::size_t reserved_ = 0;
  std::size_t committed_ = 0;
  std::size_t touched_ = 0;
};

// What all pools of one index share: how far each may grow, and the bytes that all have touched.
struct Memory {
  std::size_t reserve = 0;
  std::size_t bytes = 0;
};

class Pool {
 public:
  Pool(Memory& memory, std::size_t stride, std::size_t count_max = NONE)
      : memory_(&memory), stride_(stride), count_max_(count_max) {}

  std::uint32_t count() const { return count_; }
  std::size_t used() const { return count_ * stride_; }

  std::uint8_t* at(std::uint32_t index) const { return region_.base() + index * stride_; }

  // A new record at index count() - 1; its content is undefined. Throws std::bad_alloc, changing nothing.
  std::uint32_t allocate() {
    const std::size_t before = region_.touched();
    region_.grow((count_ + std::size_t{1}) * stride_, std::min(memory_->reserve, count_max_ * stride_));
    memory_->bytes += region_.touched() - before;
    return count_++;
  }

  // Frees a record. True: the record that was last now lies at `index`.
  bool release(std::uint32_t index) {
    const std::uint32_t last = --count_;
    const bool moved = index != last;
    if (moved) std::memcpy(at(index), at(last), stride_);
    trim(count_ == 0 ? page_bytes() : std::max(SLACK_MIN, used() / 32));
    return moved;
  }

  void trim(std::size_t slack) {
    const std::size_t before = region_.touched();
    if (before <= used() + slack) return;
    region_.shrink(used(), slack);
    memory_->bytes -= before - region_.touched();
  }

 private:
  static constexpr std::size_t SLACK_MIN = 8 << 10;  // kept, so that a count that swings costs no system calls

  Memory* memory_;
  std::size_t stride_;
  std::size_t count_max_;
  std::uint32_t count_ = 0;
  Region region_;
};

}  // namespace kvtier::index
