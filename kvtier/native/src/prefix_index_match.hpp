// Longest unbroken prefix per worker over all that it can reach. Reads only. What must not live here: locks, changes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "prefix_index_holders.hpp"
#include "prefix_index_holdings.hpp"

namespace kvtier::index {

constexpr std::uint32_t SOURCES = 6;  // gpu, predicted, dram, nvme, peer, redis: cheapest first

// Struct of arrays in one piece of memory; rows by ascending worker.
class MatchRows {
 public:
  void reset(std::uint32_t rows, std::uint32_t runs);

  std::uint32_t rows() const { return rows_; }
  std::uint32_t runs() const { return runs_; }
  std::uint64_t* tokens() const { return reinterpret_cast<std::uint64_t*>(memory_.get()); }
  std::uint32_t* workers() const { return reinterpret_cast<std::uint32_t*>(tokens() + rows_); }
  std::uint32_t* run_offsets() const { return workers() + rows_; }
  std::uint32_t* run_blocks() const { return run_offsets() + rows_ + 1; }
  std::uint8_t* run_sources() const { return reinterpret_cast<std::uint8_t*>(run_blocks() + runs_); }

  std::uint64_t blocks_queried = 0;
  std::uint64_t blocks_found = 0;  // longest prefix of any worker

 private:
  std::uint32_t rows_ = 0;
  std::uint32_t runs_ = 0;
  std::unique_ptr<std::uint64_t[]> memory_;
};

// Working memory of one match at a time, kept between matches. Every entry is valid only where its stamp is current.
class Matcher {
 public:
  void match(const Holders& holders, const Holdings& holdings, Hashes query, std::int64_t pool, MatchRows& rows);
  std::size_t bytes() const;

 private:
  struct Worker {
    std::uint64_t gpu = 0;
    std::uint64_t predicted = 0;
    std::uint32_t gpu_stamp = 0;
    std::uint32_t predicted_stamp = 0;
    std::uint32_t query_stamp = 0;
    std::uint32_t shards_seen = 0;
    std::uint32_t blocks = 0;
    std::uint32_t runs = 0;
    std::uint32_t last_run = NONE;
    bool alive = false;
  };
  struct Cell {  // one (node, namespace)
    std::uint64_t dram = 0;
    std::uint64_t nvme = 0;
    std::uint32_t stamp = 0;
  };
  struct Space {  // one namespace
    std::uint64_t stores = 0;
    std::uint64_t redis = 0;
    std::uint32_t stamp = 0;
  };
  struct Run {
    std::uint32_t blocks;
    std::uint32_t before;  // the worker's run before this one
    std::uint8_t source;
  };
  // Blocks of one page that the query has in a row: `count` slots from `slot` on.
  struct Span {
    std::uint32_t page;
    std::uint32_t slot;
    std::uint32_t count;
  };
  // Bit i of [c]: all shards have block i at sources up to c.
  struct Reach {
    std::uint64_t up_to[SOURCES];
  };

  void begin(const Holders& holders);
  void next_stamp();
  bool next_span(const Holdings& holdings, Hashes query, std::size_t from, Span& span) const;
  void gather(const Holders& holders, const Holdings& holdings, const Span& span, bool first);
  void join(const Holders& holders, std::uint32_t worker);
  void join_by_l2(const Holders& holders);
  void advance(const Holders& holders, std::uint32_t count);
  void l2_reach(const Group& group, Reach& reach) const;
  std::uint32_t take(std::uint32_t worker, const Reach& reach, std::uint32_t count);
  void add_run(Worker& worker, std::uint32_t source, std::uint32_t blocks);
  void finish(const Holders& holders, MatchRows& rows);

  std::vector<Worker> workers_;
  std::vector<Cell> cells_;
  std::vector<Space> spaces_;
  std::vector<Reach> group_reach_;
  std::vector<std::uint32_t> group_stamps_;
  std::vector<std::uint32_t> alive_;
  std::vector<std::uint32_t> joined_;
  std::vector<Run> runs_;
  std::uint32_t stamp_ = 0;
  std::uint32_t query_stamp_ = 0;
  std::int64_t pool_ = ANY_POOL;
  bool any_l2_ = false;
  bool any_predicted_ = false;
};

}  // namespace kvtier::index
