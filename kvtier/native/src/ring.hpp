// A ring in memory that two processes share, through which payloads go: the giver copies them in, the taker copies them
// out, both in pieces and at the same time. Twin: kvtier/tiers/arena/ring.py, where the layout is described.
// What must not live here: Python, sockets, whose slots the destinations are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "checksum.hpp"

namespace kvtier::ring {

inline constexpr std::size_t control_bytes = 4096;          // before the ring
inline constexpr std::size_t alignment = xxh3::round_bytes;  // of a payload's begin: no round is cut by the ring's end
inline constexpr std::size_t trailer_bytes = 16;            // the writer's checksum; where the payload began, xor its label
inline constexpr std::uint64_t bytes_min = 16 * alignment;
inline constexpr std::uint64_t bytes_max = std::uint64_t{1} << 32;
inline constexpr std::uint64_t nowhere = ~std::uint64_t{0};  // the offset of a payload that nobody wants

enum class Status : int {
  done = 0,     // all that was asked for
  waiting = 1,  // giver: the ring stays full; taker: it stays empty, and says that it sleeps
  wake = 2,     // giver: the taker has gone to sleep and must be woken by other means
  slice = 3,    // taker: as many bytes as one call may take
  broken = 4,   // taker: the giver's counter is impossible, or its trailer is of another payload
};

// Where one payload is in its way, on either side.
struct Payload {
  std::uint64_t size = 0;
  std::uint64_t done = 0;  // bytes of whole rounds that have gone
  xxh3::Lanes lanes = xxh3::initial_lanes();
};

class Giver {
 public:
  explicit Giver(std::uint64_t ring_bytes) : ring_bytes_(ring_bytes) {}

  // Copies on, from where the last call ended; `checksum` is set where it answers done. Waits up to `wait_us` for room.
  // `label` is what both sides call the payload: bytes that are not of what was announced are found out by it.
  Status give(std::uint8_t* memory, const std::uint8_t* source, std::uint64_t size, std::uint64_t label,
              std::uint64_t wait_us, std::uint64_t& checksum);
  // Whether a payload of this size may be given next: one that was begun goes on as it was.
  bool fits(std::uint64_t size) const { return !begun_ || payload_.size == size; }
  bool is_between() const { return !begun_; }
  std::uint64_t ring_bytes() const { return ring_bytes_; }

 private:
  bool has_room(const std::uint8_t* memory, std::uint64_t end) const;
  Status wait_for_room(std::uint8_t* memory, std::uint64_t end, std::uint64_t wait_us) const;
  Status advance(std::uint8_t* memory, std::uint64_t position);

  std::uint64_t ring_bytes_;
  std::uint64_t position_ = 0;  // of the payload's begin, or of the end of the last one
  bool begun_ = false;
  Payload payload_{};
};

// What one call may take and wait. A giver that dribbles holds nobody up for longer than all its waits together.
struct Share {
  std::uint64_t bytes;
  std::uint64_t idle_us;       // for the next bytes
  std::uint64_t idle_us_left;  // in all
};

struct Taken {
  std::uint64_t seen = 0;      // the checksum of what stands in the destination; of a payload taken nowhere, the declared
  std::uint64_t declared = 0;  // what the giver says
};

class Taker {
 public:
  explicit Taker(std::uint64_t ring_bytes) : ring_bytes_(ring_bytes) {}

  // Copies on into `destination` (null: nowhere), whose checksum is taken of what is stored. Takes no more than there is
  // room for in `share`, which it lessens.
  Status take(std::uint8_t* memory, std::uint8_t* destination, std::uint64_t size, std::uint64_t label,
              Share& share, Taken& taken);
  bool is_between() const { return !begun_ || payload_.done == 0; }  // nothing has been stored of one
  void awake(std::uint8_t* memory) const;  // it sleeps no longer
  bool fits(std::uint64_t size) const { return !begun_ || payload_.size == size; }
  std::uint64_t ring_bytes() const { return ring_bytes_; }

 private:
  Status wait_for_bytes(std::uint8_t* memory, std::uint64_t end, Share& share, std::uint64_t& staged) const;
  void advance(std::uint8_t* memory, std::uint64_t position) const;

  std::uint64_t ring_bytes_;
  std::uint64_t position_ = 0;
  bool begun_ = false;
  Payload payload_{};
};

}  // namespace kvtier::ring
