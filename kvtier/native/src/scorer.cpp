// The cost of every candidate of one request, and the choice. Twin: kvtier.core.scoring.decide, operation by operation.
// Rows are workers; what a router counts of them lies in columns by slot. Every call keeps the GIL: it takes microseconds.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "buffers.hpp"
#include "prefix_index_arrays.hpp"
#include "prefix_index_match.hpp"

namespace kvtier {

namespace nb = nanobind;

namespace {

using index::MatchRows;
using index::SOURCES;

constexpr double INF = std::numeric_limits<double>::infinity();
constexpr double REUSE_TIE = 1.0 / 16.0;
constexpr double SLACK_RELATIVE = 1.1;
constexpr std::size_t ROWS_MAX = 1 << 16;

// The order of kvtier.core.row_scoring.COLUMNS.
enum Column : std::size_t {
  OWN_TOKENS,
  OWN_DECODING,
  OWN_KV_TOKENS,
  QUEUED_BEYOND,
  QUEUED_AT,
  OTHER_RUNNING,
  OTHER_KV_TOKENS,
  DISTRUST_S,
  RECENT_TOKENS,
  COLUMNS
};

// The order of kvtier.core.row_scoring.WEIGHTS.
enum Weight : std::size_t {
  WORK,
  OVERLAP,
  DECODE_STEP_S,
  CHUNK_TOKENS,
  ADAPTER_LOAD_S,
  CREDIT_HALF_LIFE_S,
  TIE_RELATIVE,
  TIE_ABSOLUTE_S,
  SLACK,
  WEIGHTS
};

// A C-contiguous array of doubles of one or two dimensions, read in place.
class Doubles {
 public:
  Doubles(nb::handle object, const char* argument) : view_(object, argument) {
    const Py_buffer& raw = view_.raw();
    if (raw.itemsize != sizeof(double) || raw.format == nullptr || std::strcmp(raw.format, "d") != 0)
      refuse_type(argument, "an array of float64 is needed");
    if (reinterpret_cast<std::uintptr_t>(view_.data()) % alignof(double) != 0) refuse_value(argument, "is not aligned");
  }
  const double* data() const { return reinterpret_cast<const double*>(view_.data()); }
  std::size_t size() const { return view_.size() / sizeof(double); }
  std::vector<double> copied(const char* argument, std::size_t wanted) const {
    if (size() != wanted) refuse_value(argument, std::to_string(wanted) + " numbers are needed");
    return {data(), data() + size()};
  }

 private:
  BufferView view_;
};

// An array of one dimension of items of one width and of certain formats, read in place.
template <typename Item>
class Items {
 public:
  Items(nb::handle object, const char* argument, const char* formats) : view_(object, argument) {
    const Py_buffer& raw = view_.raw();
    const char* const format = raw.format == nullptr ? "B" : raw.format;
    const bool fits = raw.itemsize == sizeof(Item) && format[1] == '\0' && std::strchr(formats, *format) != nullptr;
    if (!fits || raw.ndim != 1) refuse_type(argument, "items are of another type");
    if (reinterpret_cast<std::uintptr_t>(view_.data()) % alignof(Item) != 0) refuse_value(argument, "is not aligned");
  }
  const Item* data() const { return reinterpret_cast<const Item*>(view_.data()); }
  std::size_t size() const { return view_.size() / sizeof(Item); }

 private:
  BufferView view_;
};

using Counts = Items<std::int64_t>;
using Flags = Items<std::uint8_t>;

std::vector<double> doubles(nb::handle object, const char* argument, std::size_t wanted) {
  return Doubles(object, argument).copied(argument, wanted);
}

std::uint64_t mixed(std::uint64_t value) {  // splitmix64's finaliser
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
  value = (value ^ value >> 27) * 0x94D049BB133111EBu;
  return value ^ value >> 31;
}

// Handed over as it lies here, what a row holds behind it: kvtier.core.row_scoring reads it.
struct Cost {
  double queue_s = 0;
  double load_s = 0;
  double compute_s = 0;
  double decode_s = 0;
  double adapter_s = 0;
  double ttft_s = 0;
  double total_s = INF;
  double reused = 0;
};
constexpr std::size_t COST_BYTES = sizeof(Cost);
constexpr std::size_t HELD_BYTES = SOURCES * sizeof(double);

struct Question {
  double prompt_tokens;
  double now;
  double age_s;
  double u;
};

class Scorer {
 public:
  Scorer(nb::handle slots, nb::handle holders, nb::handle fixed, nb::handle ranking, nb::handle weights,
         nb::sequence groups) {
    const IntegerArray slot_numbers(slots, "slots", UINT32_MAX);
    const std::size_t rows = slot_numbers.size();
    if (rows == 0 || rows > ROWS_MAX) refuse_value("slots", "1 to 65536 rows are possible");
    const IntegerArray holder_numbers(holders, "holders", UINT32_MAX);
    if (holder_numbers.size() != rows) refuse_value("holders", "a number for each row is needed");
    for (std::size_t i = 0; i < rows; ++i) {
      slots_.push_back(static_cast<std::uint32_t>(slot_numbers[i]));
      holders_.push_back(static_cast<std::uint32_t>(holder_numbers[i]));
      slots_end_ = std::max(slots_end_, std::size_t{slots_.back()} + 1);
    }
    fixed_ = doubles(fixed, "fixed", 3 * rows);
    weights_ = doubles(weights, "weights", WEIGHTS);
    const index::Array<std::uint64_t> seeds(ranking, "ranking");
    if (seeds.size() != rows) refuse_value("ranking", "a seed for each row is needed");
    seeds_.assign(seeds.data(), seeds.data() + rows);
    for (const nb::handle group : groups) read_group(group, rows);
    held_.resize(rows * SOURCES);
    costs_.resize(rows);
    queued_.resize(rows);
  }

  void set_speeds(nb::handle token_s, nb::handle pair_s, nb::handle latency_s, nb::handle byte_s) {
    const std::size_t rows = slots_.size();
    std::vector<double> token = doubles(token_s, "token_s", rows);
    std::vector<double> pair = doubles(pair_s, "pair_s", rows);
    std::vector<double> latency = doubles(latency_s, "latency_s", rows * SOURCES);
    std::vector<double> byte = doubles(byte_s, "byte_s", rows * SOURCES);
    token_s_.swap(token);
    pair_s_.swap(pair);
    latency_s_.swap(latency);
    byte_s_.swap(byte);
    fastest_s_ = *std::min_element(token_s_.begin(), token_s_.end());
  }

  // Forgets what the last request's matches found.
  void begin() { std::fill(held_.begin(), held_.end(), 0.0); }

  // Adds what one chain's match found; workers that have no row in the group are passed over.
  void add(nb::handle group, nb::handle result) {
    const Group& chain = groups_[integer_argument(group, "group", 0, groups_.size() - 1)];
    if (!nb::isinstance<MatchRows>(result)) refuse_type("result", "a MatchResult is needed");
    const auto& found = nb::cast<const MatchRows&>(result);
    for (std::uint32_t i = 0; i < found.rows(); ++i) {
      const std::uint32_t holder = found.workers()[i];
      if (holder >= chain.rows.size() || chain.rows[holder] == NO_ROW) continue;
      double* const held = held_.data() + std::size_t{chain.rows[holder]} * SOURCES;
      for (std::uint32_t run = found.run_offsets()[i]; run < found.run_offsets()[i + 1]; ++run)
        held[found.run_sources()[run]] += found.run_blocks()[run] * chain.block_tokens;
    }
  }

  // The choice among the rows of `mask`: its row, seven numbers of its cost and what it holds by source. Siblings meet by
  // `hashes`, of `group`; none: near-ties are drawn by `u`.
  nb::tuple decide(nb::handle columns, nb::handle foreign, nb::handle mask, nb::handle asked, nb::handle hashes,
                   nb::handle group) {
    const Doubles counted(columns, "columns");
    if (counted.size() % COLUMNS != 0 || counted.size() / COLUMNS < slots_end_)
      refuse_value("columns", "every slot is needed in each");
    const Flags candidates(mask, "mask", "?B");
    if (candidates.size() != slots_.size()) refuse_value("mask", "a byte for each row is needed");
    const Counts waiting(foreign, "foreign", "lq");
    const Question question = read_question(asked);
    const index::Array<std::uint64_t> chain(hashes, "hashes");
    const std::size_t number = integer_argument(group, "group", 0, groups_.size() - 1);
    if (token_s_.empty()) refuse_value("columns", "no speeds were set");
    const double best = score(counted, waiting, candidates, question);
    near_.clear();
    const double band = std::max(weights_[TIE_ABSOLUTE_S], weights_[TIE_RELATIVE] * best);
    for (std::size_t row = 0; row < costs_.size(); ++row)
      if (costs_[row].total_s <= best + band) near_.push_back(static_cast<std::uint32_t>(row));
    const double* const recent = counted.data() + RECENT_TOKENS * (counted.size() / COLUMNS);
    const std::size_t row = chain.size() == 0 ? draw(recent, question.u) : first(recent, question, chain, groups_[number]);
    const Cost& cost = costs_[row];
    const double* const held = held_.data() + row * SOURCES;
    return nb::make_tuple(row, queued_[row], cost.queue_s, cost.load_s, cost.compute_s, cost.ttft_s, cost.reused,
                          nb::make_tuple(held[0], held[1], held[2], held[3], held[4], held[5]), told());
  }

 private:
  // All costs, for who asks later.
  nb::bytes told() const {
    nb::bytes result = new_bytes(costs_.size() * (COST_BYTES + HELD_BYTES));
    std::uint8_t* at = contents(result);
    for (std::size_t row = 0; row < costs_.size(); ++row) {
      std::memcpy(at, &costs_[row], COST_BYTES);
      std::memcpy(at + COST_BYTES, held_.data() + row * SOURCES, HELD_BYTES);
      at += COST_BYTES + HELD_BYTES;
    }
    return result;
  }

  static constexpr std::uint32_t NO_ROW = UINT32_MAX;

  struct Group {
    std::vector<std::uint32_t> rows;  // by holder
    double block_tokens = 0;
    double affinity_tokens = 0;
  };

  // (rows by holder as u32, tokens of a block, tokens of affinity)
  void read_group(nb::handle object, std::size_t rows) {
    if (!PyTuple_Check(object.ptr()) || PyTuple_GET_SIZE(object.ptr()) != 3) refuse_type("groups", "triples are needed");
    const IntegerArray numbers(nb::handle(PyTuple_GET_ITEM(object.ptr(), 0)), "groups", UINT32_MAX);
    Group group;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const auto row = static_cast<std::uint32_t>(numbers[i]);
      if (row != NO_ROW && row >= rows) refuse_value("groups", "a row lies outside of the table");
      group.rows.push_back(row);
    }
    const auto tokens = [object](Py_ssize_t at) {
      return static_cast<double>(integer_argument(nb::handle(PyTuple_GET_ITEM(object.ptr(), at)), "groups", 1, 1 << 24));
    };
    group.block_tokens = tokens(1);
    group.affinity_tokens = tokens(2);
    groups_.push_back(std::move(group));
  }

  // (tokens of the prompt, now, age of what is held, u)
  static Question read_question(nb::handle asked) {
    if (!PyTuple_Check(asked.ptr()) || PyTuple_GET_SIZE(asked.ptr()) != 4) refuse_type("asked", "four numbers are needed");
    std::array<double, 4> found{};
    for (std::size_t i = 0; i < found.size(); ++i) {
      PyObject* const item = PyTuple_GET_ITEM(asked.ptr(), static_cast<Py_ssize_t>(i));
      if (!PyFloat_Check(item) && !PyLong_CheckExact(item)) refuse_type("asked", "four numbers are needed");
      found[i] = PyFloat_AsDouble(item);
      if (PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        refuse_value("asked", "numbers must be small enough");
      }
    }
    if (!(found[0] >= 1) || !(found[3] >= 0 && found[3] < 1)) refuse_value("asked", "no prompt, or u is not in [0, 1)");
    return {found[0], found[1], found[2], found[3]};
  }

  // Fills costs_; the least of all.
  double score(const Doubles& counted, const Counts& waiting, const Flags& candidates, const Question& question) {
    double best = INF;
    for (std::size_t row = 0; row < slots_.size(); ++row) {
      costs_[row] = Cost{};
      queued_[row] = 0;
      if (candidates.data()[row] == 0) continue;
      const double foreign = holders_[row] < waiting.size() ? static_cast<double>(waiting.data()[holders_[row]]) : 0.0;
      score_row(row, counted.data() + slots_[row], counted.size() / COLUMNS, foreign, question);
      if (std::isnan(costs_[row].total_s)) refuse_value("columns", "a column or a speed is not a number");
      best = std::min(best, costs_[row].total_s);
    }
    if (!(best < INF)) refuse_value("mask", "nobody is a candidate, or a cost is not finite");
    return best;
  }

  void score_row(std::size_t row, const double* at, std::size_t stride, double foreign, const Question& question) {
    const auto column = [at, stride](Column number) { return at[number * stride]; };
    Cost& cost = costs_[row];
    const double token_s = token_s_[row];
    queued_[row] = std::max(column(QUEUED_BEYOND) - (question.now - column(QUEUED_AT)) / token_s, 0.0);
    cost.queue_s = token_s * (queued_[row] + (column(OWN_TOKENS) + foreign));
    reuse(row, column(DISTRUST_S) + question.age_s, question.prompt_tokens, cost);
    const double capacity_tokens = fixed_[3 * row], is_loaded = fixed_[3 * row + 2];
    const double wait_s = cost.queue_s + cost.compute_s;
    const double steps = 1.0 + wait_s / (token_s * weights_[CHUNK_TOKENS]);
    const double pinned = column(OWN_KV_TOKENS) + column(OTHER_KV_TOKENS);
    const double missing = std::max(0.0, pinned + question.prompt_tokens - capacity_tokens);
    const double decoding = column(OWN_DECODING) + column(OTHER_RUNNING);
    cost.decode_s = decoding * weights_[DECODE_STEP_S] * steps + missing * token_s;
    cost.adapter_s = is_loaded != 0.0 ? 0.0 : weights_[ADAPTER_LOAD_S];
    const double visible_s = std::max(cost.load_s - cost.queue_s, 0.0);
    const double hidden_s = weights_[OVERLAP] * std::min(visible_s, cost.compute_s);
    cost.ttft_s = wait_s + visible_s - hidden_s + cost.decode_s + cost.adapter_s;
    cost.total_s = cost.ttft_s + weights_[WORK] * (cost.compute_s * (fastest_s_ / token_s));
  }

  // Load, compute and reused tokens at the best cut between sources.
  void reuse(std::size_t row, double age_s, double prompt, Cost& cost) const {
    const double* const held = held_.data() + row * SOURCES;
    const double* const latency_s = latency_s_.data() + row * SOURCES;
    const double* const byte_s = byte_s_.data() + row * SOURCES;
    const double kv_bytes = fixed_[3 * row + 1];
    const double credit = age_s == 0.0 ? 1.0 : std::exp2(age_s / -weights_[CREDIT_HALF_LIFE_S]);
    double sum = 0, reach_before = 0, load_s = 0, least_work_s = INF, least_s = INF;
    for (std::size_t source = 0; source < SOURCES; ++source) {
      sum += held[source];
      const double reach = std::min(sum * credit, prompt - 1);
      const double step = reach - reach_before;
      reach_before = reach;
      load_s += byte_s[source] * step * kv_bytes + (step > 0 ? latency_s[source] : 0.0);
      const double context = (prompt + reach) / 2.0;
      const double compute_s = (prompt - reach) * (token_s_[row] + pair_s_[row] * context);
      const double work_s = load_s + compute_s;
      least_work_s = std::min(least_work_s, work_s);
      if (work_s > least_work_s) continue;
      const double total_s = work_s - weights_[OVERLAP] * std::min(load_s, compute_s);
      if (source != 0 && !(total_s < least_s)) continue;
      least_s = total_s;
      cost.load_s = load_s;
      cost.compute_s = compute_s;
      cost.reused = reach;
    }
  }

  // Two of the near-ties by u; the one that was sent less lately.
  std::size_t draw(const double* recent, double u) const {
    const std::size_t count = near_.size();
    if (count == 1) return near_[0];
    const auto pair = static_cast<std::size_t>(u * static_cast<double>(count) * static_cast<double>(count - 1));
    const std::size_t one = pair / (count - 1);
    std::size_t other = pair % (count - 1);
    other += other >= one;
    return recent[slots_[near_[one]]] <= recent[slots_[near_[other]]] ? near_[one] : near_[other];
  }

  // Of the near-ties that reuse most the first by rank, unless it was sent clearly more lately than the second.
  std::size_t first(const double* recent, const Question& question, const index::Array<std::uint64_t>& chain,
                    const Group& group) {
    if (near_.size() == 1) return near_[0];
    double most = 0;
    for (const std::uint32_t row : near_) most = std::max(most, costs_[row].reused);
    const double enough = most - REUSE_TIE * question.prompt_tokens;
    const double beyond = std::floor(std::floor(most + group.affinity_tokens) / group.block_tokens);
    const std::size_t last = chain.size() - 1;
    const std::size_t at = beyond < static_cast<double>(last) ? static_cast<std::size_t>(beyond) : last;
    const std::uint64_t key = mixed(chain.data()[at] + 0x9E3779B97F4A7C15u);
    double ranks[2] = {INF, INF};
    std::size_t rows[2] = {near_[0], near_[0]};
    std::size_t count = 0;
    for (const std::uint32_t row : near_) {
      if (costs_[row].reused < enough) continue;
      ++count;
      const double uniform = (static_cast<double>(mixed(seeds_[row] ^ key) >> 11) + 0.5) / 9007199254740992.0;
      const double rank = -std::log(uniform);
      if (rank < ranks[0]) {
        ranks[1] = ranks[0];
        rows[1] = rows[0];
        ranks[0] = rank;
        rows[0] = row;
      } else if (rank < ranks[1]) {
        ranks[1] = rank;
        rows[1] = row;
      }
    }
    if (count < 2) return rows[0];
    const double bound = SLACK_RELATIVE * recent[slots_[rows[1]]] + weights_[SLACK] * question.prompt_tokens;
    return recent[slots_[rows[0]]] <= bound ? rows[0] : rows[1];
  }

  std::vector<std::uint32_t> slots_;
  std::vector<std::uint32_t> holders_;  // beyond every array where there is none
  std::size_t slots_end_ = 0;
  std::vector<double> fixed_;  // of each row: capacity in tokens, KV bytes of a token, whether the adapter is loaded
  std::vector<double> weights_;
  std::vector<std::uint64_t> seeds_;
  std::vector<Group> groups_;
  std::vector<double> token_s_, pair_s_, latency_s_, byte_s_;
  double fastest_s_ = 0;
  std::vector<double> held_;
  std::vector<Cost> costs_;
  std::vector<double> queued_;  // tokens that wait beyond all routers
  std::vector<std::uint32_t> near_;
};

}  // namespace

void bind_scorer(nb::module_& m) {
  nb::class_<Scorer>(m, "Scorer")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::sequence>(), nb::arg("slots"),
           nb::arg("holders"), nb::arg("fixed"), nb::arg("ranking"), nb::arg("weights"), nb::arg("groups"))
      .def("set_speeds", &Scorer::set_speeds, nb::arg("token_s"), nb::arg("pair_s"), nb::arg("latency_s"),
           nb::arg("byte_s"))
      .def("begin", &Scorer::begin)
      .def("add", &Scorer::add, nb::arg("group"), nb::arg("result"))
      .def("decide", &Scorer::decide, nb::arg("columns"), nb::arg("foreign"), nb::arg("mask"), nb::arg("asked"),
           nb::arg("hashes"), nb::arg("group"));
}

}  // namespace kvtier
