// kvtier._native.PrefixIndex: turns Python arguments into plain memory and back. What must not live here: the index.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <random>
#include <string>

#include "bindings.hpp"
#include "prefix_index.hpp"
#include "prefix_index_arrays.hpp"

namespace nb = nanobind;

namespace kvtier {

namespace {

using index::Array;
using index::Hashes;
using index::MatchRows;
using index::PrefixIndex;

constexpr std::size_t APPLY_WITH_GIL_MAX = 256;  // blocks; getting the GIL back costs more than so few

using HashArray = Array<std::uint64_t>;

Hashes hashes_of(const HashArray& array) { return {array.data(), array.size()}; }

nb::tuple as_tuple(const index::Counts& counts) {
  return nb::make_tuple(counts.stored, counts.removed, counts.unknown, counts.refused, counts.evicted);
}

template <typename Item>
nb::object view(const Item* data, std::size_t size, nb::handle owner) {
  return nb::cast(nb::ndarray<nb::numpy, const Item, nb::ndim<1>>(data, {size}, owner));
}

// A vector handed over to numpy.
template <typename Item>
nb::object hand_over(std::vector<Item>&& items) {
  auto* const kept = new std::vector<Item>(std::move(items));
  const nb::capsule owner(kept, [](void* gone) noexcept { delete static_cast<std::vector<Item>*>(gone); });
  return nb::cast(nb::ndarray<nb::numpy, Item, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

nb::tuple apply(PrefixIndex& self, std::int64_t holder, std::int64_t shard, nb::handle kinds, nb::handle tiers,
                nb::handle lengths, nb::handle parents, nb::handle hashes) {
  const Array<std::uint8_t> kind_array(kinds, "kinds");
  const Array<std::uint8_t> tier_array(tiers, "tiers");
  const Array<std::uint32_t> length_array(lengths, "lengths");
  const HashArray parent_array(parents, "parents");
  const HashArray hash_array(hashes, "hashes");
  const index::Batch batch{kind_array.data(),   tier_array.data(),   length_array.data(), parent_array.data(),
                           kind_array.size(),   tier_array.size(),   length_array.size(), parent_array.size(),
                           hashes_of(hash_array)};
  index::Counts counts;
  if (batch.hashes.count <= APPLY_WITH_GIL_MAX && self.apply(holder, shard, batch, counts, false))
    return as_tuple(counts);
  {
    const nb::gil_scoped_release release;
    self.apply(holder, shard, batch, counts, true);
  }
  return as_tuple(counts);
}

// Messages are bytes objects, which nobody can write to: they are read in place.
nb::tuple apply_messages(PrefixIndex& self, std::int64_t holder, std::int64_t shard, std::uint64_t seq,
                         nb::list messages, std::int64_t room_blocks) {
  std::vector<Column> columns;
  std::vector<nb::bytes> kept;  // the list may change while the GIL is given up
  columns.reserve(messages.size());
  kept.reserve(messages.size());
  std::size_t bytes = 0;
  for (const nb::handle message : messages) {
    if (!PyBytes_CheckExact(message.ptr())) refuse_type("messages", "items must be bytes");
    kept.push_back(nb::borrow<nb::bytes>(message));
    columns.push_back({reinterpret_cast<const std::uint8_t*>(kept.back().c_str()), kept.back().size()});
    bytes += kept.back().size();
  }
  index::Run run;
  const bool is_brief = bytes <= APPLY_WITH_GIL_MAX * sizeof(std::uint64_t) * 2;
  if (!is_brief || !self.apply_messages(holder, shard, seq, columns, room_blocks, run, false)) {
    const nb::gil_scoped_release release;
    self.apply_messages(holder, shard, seq, columns, room_blocks, run, true);
  }
  const index::Counts& counts = run.counts;
  return nb::make_tuple(run.messages, run.events, counts.stored, counts.removed, counts.unknown, counts.refused,
                        counts.evicted);
}

void match_into(const PrefixIndex& self, Hashes query, std::int64_t pool, MatchRows& rows) {
  // Giving up the GIL costs more than a short match, and waiting for a change while holding it costs all.
  if (self.is_brief(query.count) && self.match(query, pool, rows, false)) return;
  const nb::gil_scoped_release release;
  self.match(query, pool, rows, true);
}

MatchRows match(const PrefixIndex& self, nb::handle hashes, std::int64_t pool) {
  const HashArray query(hashes, "hashes");
  MatchRows rows;
  match_into(self, hashes_of(query), pool, rows);
  return rows;
}

nb::list match_many(const PrefixIndex& self, nb::sequence queries, std::int64_t pool) {
  std::vector<std::unique_ptr<HashArray>> arrays;
  for (const nb::handle query : queries) arrays.push_back(std::make_unique<HashArray>(query, "hashes"));
  std::vector<MatchRows> rows(arrays.size());
  {
    const nb::gil_scoped_release release;
    for (std::size_t i = 0; i < arrays.size(); ++i) self.match(hashes_of(*arrays[i]), pool, rows[i], true);
  }
  nb::list results;
  for (MatchRows& row : rows) results.append(nb::cast(std::move(row)));
  return results;
}

nb::tuple locate(const PrefixIndex& self, nb::handle hashes, std::int64_t name_space, std::int64_t most,
                 std::uint64_t turn) {
  const HashArray query(hashes, "hashes");
  std::vector<std::uint32_t> counts;
  std::vector<std::uint32_t> holders;
  {
    const nb::gil_scoped_release release;
    self.locate(hashes_of(query), name_space, most, turn, counts, holders);
  }
  return nb::make_tuple(hand_over(std::move(counts)), hand_over(std::move(holders)));
}

nb::tuple snapshot(const PrefixIndex& self, std::int64_t holder, std::int64_t tier, std::int64_t shard) {
  std::vector<std::uint64_t> hashes;
  std::vector<std::uint32_t> run_lengths;
  {
    const nb::gil_scoped_release release;
    self.snapshot(holder, tier, shard, hashes, run_lengths);
  }
  return nb::make_tuple(hand_over(std::move(hashes)), hand_over(std::move(run_lengths)));
}

nb::tuple load(PrefixIndex& self, std::int64_t holder, std::int64_t tier, std::int64_t shard, nb::handle hashes,
               nb::handle run_lengths) {
  const HashArray hash_array(hashes, "hashes");
  const Array<std::uint32_t> length_array(run_lengths, "run_lengths");
  const std::vector<std::uint32_t> lengths(length_array.data(), length_array.data() + length_array.size());
  index::Counts counts;
  {
    const nb::gil_scoped_release release;
    counts = self.load(holder, tier, shard, hashes_of(hash_array), lengths);
  }
  return as_tuple(counts);
}

nb::dict stats(const PrefixIndex& self) {
  const index::Stats stats = [&self] {
    const nb::gil_scoped_release release;
    return self.stats();
  }();
  nb::list holders;
  for (const index::HolderStats& holder : stats.holders)
    holders.append(nb::make_tuple(
        holder.holder, holder.hidden,
        nb::make_tuple(holder.copies[0], holder.copies[1], holder.copies[2], holder.copies[3]), holder.truncated));
  nb::dict result;
  result["blocks"] = stats.blocks;
  result["holdings"] = stats.holdings;
  result["predicted"] = stats.predicted;
  result["pages"] = stats.pages;
  result["tickets"] = stats.tickets;
  result["bytes"] = stats.bytes;
  result["evicted"] = stats.evicted;
  result["matches"] = stats.matches;
  result["blocks_queried"] = stats.blocks_queried;
  result["blocks_found"] = stats.blocks_found;
  result["holders"] = holders;
  return result;
}

void bind_match_result(nb::module_& m) {
  nb::class_<MatchRows>(m, "MatchResult")
      .def_ro("blocks_queried", &MatchRows::blocks_queried)
      .def_ro("blocks_found", &MatchRows::blocks_found)
      .def("__len__", &MatchRows::rows)
      .def_prop_ro("workers",
                   [](nb::handle_t<MatchRows> self) {
                     const auto& rows = nb::cast<const MatchRows&>(self);
                     return view(rows.workers(), rows.rows(), self);
                   })
      .def_prop_ro("tokens",
                   [](nb::handle_t<MatchRows> self) {
                     const auto& rows = nb::cast<const MatchRows&>(self);
                     return view(rows.tokens(), rows.rows(), self);
                   })
      .def_prop_ro("run_offsets",
                   [](nb::handle_t<MatchRows> self) {
                     const auto& rows = nb::cast<const MatchRows&>(self);
                     return view(rows.run_offsets(), rows.rows() + std::size_t{1}, self);
                   })
      .def_prop_ro("run_sources",
                   [](nb::handle_t<MatchRows> self) {
                     const auto& rows = nb::cast<const MatchRows&>(self);
                     return view(rows.run_sources(), rows.runs(), self);
                   })
      .def_prop_ro("run_blocks", [](nb::handle_t<MatchRows> self) {
        const auto& rows = nb::cast<const MatchRows&>(self);
        return view(rows.run_blocks(), rows.runs(), self);
      });
}

}  // namespace

void bind_prefix_index(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  bind_match_result(m);
  nb::class_<PrefixIndex>(m, "PrefixIndex")
      .def(
          "__init__",
          [](PrefixIndex* self, std::int64_t bytes_max, std::int64_t holders_max, std::int64_t shards_max,
             std::int64_t block_tokens_max, std::int64_t batch_events_max, std::int64_t batch_blocks_max,
             std::int64_t match_blocks_max, std::int64_t copies_max, std::int64_t tickets_per_worker_max) {
            std::random_device entropy;
            const std::uint64_t seed = std::uint64_t{entropy()} << 32 | entropy();
            new (self) PrefixIndex({bytes_max, holders_max, shards_max, block_tokens_max, batch_events_max,
                                    batch_blocks_max, match_blocks_max, copies_max, tickets_per_worker_max},
                                   seed);
          },
          nb::arg("bytes_max"), nb::arg("holders_max"), nb::arg("shards_max"),
          nb::arg("block_tokens_max"), nb::arg("batch_events_max"), nb::arg("batch_blocks_max"),
          nb::arg("match_blocks_max"), nb::arg("copies_max"), nb::arg("tickets_per_worker_max"))
      .def("add_holder", &PrefixIndex::add_holder, nb::arg("holder"), nb::arg("kind"), nb::arg("node"),
           nb::arg("namespaces"), nb::arg("pool"), nb::arg("block_tokens"), Release())
      .def("remove_holder", &PrefixIndex::remove_holder, nb::arg("holder"), Release())
      .def("hide", [](PrefixIndex& self, std::int64_t holder) { self.hide(holder, true); }, nb::arg("holder"), Release())
      .def("resume", [](PrefixIndex& self, std::int64_t holder) { self.hide(holder, false); }, nb::arg("holder"),
           Release())
      .def("holders", &PrefixIndex::holders, Release())
      .def("apply", &apply, nb::arg("holder"), nb::arg("shard"), nb::arg("kinds"), nb::arg("tiers"),
           nb::arg("lengths"), nb::arg("parents"), nb::arg("hashes"))
      .def("apply_messages", &apply_messages, nb::arg("holder"), nb::arg("shard"), nb::arg("seq"),
           nb::arg("messages"), nb::arg("room_blocks"))
      .def(
          "store",
          [](PrefixIndex& self, std::int64_t holder, std::int64_t tier, std::int64_t shard, nb::handle hashes,
             std::uint64_t parent) {
            const HashArray array(hashes, "hashes");
            index::Counts counts;
            {
              const nb::gil_scoped_release release;
              counts = self.store(holder, tier, shard, hashes_of(array), parent);
            }
            return as_tuple(counts);
          },
          nb::arg("holder"), nb::arg("tier"), nb::arg("shard"), nb::arg("hashes"), nb::arg("parent") = 0)
      .def(
          "remove",
          [](PrefixIndex& self, std::int64_t holder, std::int64_t tier, std::int64_t shard, nb::handle hashes) {
            const HashArray array(hashes, "hashes");
            index::Counts counts;
            {
              const nb::gil_scoped_release release;
              counts = self.remove(holder, tier, shard, hashes_of(array));
            }
            return as_tuple(counts);
          },
          nb::arg("holder"), nb::arg("tier"), nb::arg("shard"), nb::arg("hashes"))
      .def("clear", &PrefixIndex::clear, nb::arg("holder"), nb::arg("tier") = nb::none(),
           nb::arg("shard") = nb::none(), Release())
      .def("match", &match, nb::arg("hashes"), nb::arg("pool") = index::ANY_POOL)
      .def("match_many", &match_many, nb::arg("queries"), nb::arg("pool") = index::ANY_POOL)
      .def("locate", &locate, nb::arg("hashes"), nb::arg("namespace"), nb::arg("most"), nb::arg("turn"))
      .def("snapshot", &snapshot, nb::arg("holder"), nb::arg("tier"), nb::arg("shard"))
      .def("load", &load, nb::arg("holder"), nb::arg("tier"), nb::arg("shard"), nb::arg("hashes"),
           nb::arg("run_lengths"))
      .def(
          "digest",
          [](const PrefixIndex& self, std::int64_t holder, std::int64_t tier, std::int64_t shard) {
            index::Digest digest;
            {
              const nb::gil_scoped_release release;
              digest = self.digest(holder, tier, shard);
            }
            return nb::make_tuple(digest.count, digest.xored);
          },
          nb::arg("holder"), nb::arg("tier"), nb::arg("shard"))
      .def(
          "predict",
          [](PrefixIndex& self, std::int64_t worker, nb::handle hashes, std::uint64_t ticket, double expires_at) {
            const HashArray array(hashes, "hashes");
            if (array.size() <= APPLY_WITH_GIL_MAX) {
              const auto done = self.predict(worker, hashes_of(array), ticket, expires_at, false);
              if (done) return *done;
            }
            const nb::gil_scoped_release release;
            return self.predict(worker, hashes_of(array), ticket, expires_at, true).value();
          },
          nb::arg("worker"), nb::arg("hashes"), nb::arg("ticket"), nb::arg("expires_at"))
      .def(
          "release",
          [](PrefixIndex& self, std::uint64_t ticket) {
            if (const auto done = self.release(ticket, false)) return *done;
            const nb::gil_scoped_release release;
            return self.release(ticket, true).value();
          },
          nb::arg("ticket"))
      .def("expire", &PrefixIndex::expire, nb::arg("now"), Release())
      .def("stats", &stats);
}

}  // namespace kvtier
