// The names of cached KV blocks, each with the number of a set of workers that have it. The twin is
// `DictNames` of disagg/router/block_names.py, which is the specification; `CompiledNames` there
// calls the plain C interface at the end. Needs no instruction set.
//
// 256 shards, so that growing and purging touch few names at a time. A shard keeps its entries in a
// ring in order of arrival, so the oldest are found first, and finds them by open addressing with
// linear probing. A slot is an entry's place plus one (24 bits) and 8 bits of its hash.

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace {

constexpr uint32_t NUM_SHARDS = 256, NAME_NBYTES = 16, GROUP = 16;
constexpr uint32_t PLACE_BITS = 24, PLACE_MASK = (1u << PLACE_BITS) - 1;
constexpr uint32_t ASKED = 1u << 31, NOWHERE = ~0u, LEAST_ROOM = 8;

struct Entry {
  char name[NAME_NBYTES];
  uint32_t set;  // 0: a hole; with ASKED: it was looked up since it was last spared
};
static_assert(sizeof(Entry) == 20, "entries are packed");

uint64_t hash_of(const char* name) {
  uint64_t low, high;
  memcpy(&low, name, 8);
  memcpy(&high, name + 8, 8);
  uint64_t x = (low ^ (high * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9;
  x ^= x >> 29;
  x *= 0x94D049BB133111EB;
  return x ^ (x >> 32);
}

uint32_t shard_of(uint64_t hash) { return hash >> 56; }
uint32_t tag_of(uint64_t hash) { return uint32_t(hash >> 48 & 0xFF) << PLACE_BITS; }

struct Shard {
  std::vector<Entry> ring;
  std::vector<uint32_t> slots;
  uint32_t oldest = 0, num_used = 0, num_live = 0;  // used: with holes

  uint32_t home(uint64_t hash) const {
    return uint32_t((hash & 0xFFFFFFFF) * slots.size() >> 32);
  }

  uint32_t next(uint32_t slot) const { return slot + 1 == slots.size() ? 0 : slot + 1; }

  // The slot of a name; NOWHERE: it is not here.
  uint32_t find(const char* name, uint64_t hash) const {
    if (slots.empty()) return NOWHERE;
    const uint32_t tag = tag_of(hash);
    for (uint32_t slot = home(hash); slots[slot]; slot = next(slot)) {
      const uint32_t held = slots[slot];
      if ((held & ~PLACE_MASK) == tag &&
          memcmp(ring[(held & PLACE_MASK) - 1].name, name, NAME_NBYTES) == 0)
        return slot;
    }
    return NOWHERE;
  }

  Entry& entry(uint32_t slot) { return ring[(slots[slot] & PLACE_MASK) - 1]; }

  void link(uint64_t hash, uint32_t place) {
    uint32_t slot = home(hash);
    while (slots[slot]) slot = next(slot);
    slots[slot] = tag_of(hash) | (place + 1);
  }

  // Leaves no gap in any chain of slots.
  void unlink(uint32_t gap) {
    for (uint32_t slot = next(gap); slots[slot]; slot = next(slot)) {
      const uint32_t wanted = home(hash_of(entry(slot).name));
      const bool stays = gap <= slot ? gap < wanted && wanted <= slot : gap < wanted || wanted <= slot;
      if (stays) continue;
      slots[gap] = slots[slot];
      gap = slot;
    }
    slots[gap] = 0;
  }

  void remove(uint32_t slot) {
    entry(slot).set = 0;
    unlink(slot);
    num_live--;
  }

  // Entries in order, without holes, in a ring of so many places.
  void move_to(uint32_t num_places) {
    std::vector<Entry> moved;
    moved.reserve(num_places);
    for (uint32_t n = 0; n < num_used; n++) {
      const Entry& each = ring[(oldest + n) % ring.size()];
      if (each.set) moved.push_back(each);
    }
    moved.resize(num_places);
    ring.swap(moved);
    std::vector<uint32_t>(num_places ? num_places + num_places / 3 + 1 : 0, 0).swap(slots);
    oldest = 0;
    num_used = num_live;
    for (uint32_t place = 0; place < num_live; place++) link(hash_of(ring[place].name), place);
  }

  // Returns false where there is no place for one more.
  bool make_place() {
    const uint32_t room = ring.size();
    if (num_used < room) return true;
    if (num_live >= room - room / 5) {
      const uint32_t wanted = room + room / 4 > LEAST_ROOM ? room + room / 4 : LEAST_ROOM;
      if (wanted >= PLACE_MASK) return false;
      move_to(wanted);
    } else {
      move_to(room);
    }
    return num_used < ring.size();
  }

  void append(const char* name, uint64_t hash, uint32_t set) {
    const uint32_t place = (oldest + num_used) % ring.size();
    memcpy(ring[place].name, name, NAME_NBYTES);
    ring[place].set = set;
    link(hash, place);
    num_used++;
    num_live++;
  }

  void shrink() {
    if (num_live >= ring.size() / 2) return;
    const uint32_t wanted = num_live + num_live / 4;
    move_to(num_live && wanted < LEAST_ROOM ? LEAST_ROOM : wanted);
  }

  size_t nbytes() const {
    return ring.capacity() * sizeof(Entry) + slots.capacity() * sizeof(uint32_t);
  }
};

struct Names {
  Shard shards[NUM_SHARDS];
  std::vector<uint32_t> counts;  // of names, by set
  std::vector<uint8_t> is_dead;  // by set
  uint64_t num_names = 0, num_dead = 0;
  uint32_t hand = 0;  // the shard in which room is made next

  void count(uint32_t set, int change) {
    if (set >= counts.size()) {
      counts.resize(set + set / 4 + 64);
      is_dead.resize(counts.size());
    }
    counts[set] += change;
    num_names += change;
    if (is_dead[set]) num_dead += change;
  }

  void put(const char* name, uint32_t set) {
    const uint64_t hash = hash_of(name);
    Shard& shard = shards[shard_of(hash)];
    const uint32_t slot = shard.find(name, hash);
    if (slot != NOWHERE) {
      Entry& entry = shard.entry(slot);
      count(entry.set & ~ASKED, -1);
      if (!set) return shard.remove(slot);
      entry.set = set | (entry.set & ASKED);
    } else {
      if (!set || !shard.make_place()) return;
      shard.append(name, hash, set);
    }
    count(set, 1);
  }

  // Removes the oldest 64th of a shard, but for names that were looked up: they become the newest.
  void make_room_in(Shard& shard) {
    for (uint32_t left = (shard.num_live + 63) / 64; left && shard.num_live;) {
      const Entry oldest = shard.ring[shard.oldest];
      if (oldest.set) {
        const uint64_t hash = hash_of(oldest.name);
        shard.remove(shard.find(oldest.name, hash));
        left--;
      }
      shard.oldest = (shard.oldest + 1) % shard.ring.size();
      shard.num_used--;
      if (oldest.set & ASKED)
        shard.append(oldest.name, hash_of(oldest.name), oldest.set & ~ASKED);
      else if (oldest.set)
        count(oldest.set, -1);
    }
  }

  void purge(Shard& shard) {
    for (uint32_t n = 0; n < shard.num_used; n++) {
      const Entry& each = shard.ring[(shard.oldest + n) % shard.ring.size()];
      const uint32_t set = each.set & ~ASKED;
      if (!set || !is_dead[set]) continue;
      shard.remove(shard.find(each.name, hash_of(each.name)));
      count(set, -1);
    }
    shard.shrink();
  }
};

// Calls `take(i, entry or nullptr)` for each name in order, until it returns false. What the next
// names need is fetched from memory meanwhile.
template <typename Take>
void look_up(Names* table, const char* names, int64_t num, Take take) {
  uint64_t hashes[GROUP];
  for (int64_t begin = 0; begin < num; begin += GROUP) {
    const int64_t size = num - begin < GROUP ? num - begin : GROUP;
    const char* group = names + begin * NAME_NBYTES;
    for (int64_t i = 0; i < size; i++) {
      hashes[i] = hash_of(group + i * NAME_NBYTES);
      const Shard& shard = table->shards[shard_of(hashes[i])];
      if (!shard.slots.empty()) __builtin_prefetch(&shard.slots[shard.home(hashes[i])]);
    }
    for (int64_t i = 0; i < size; i++) {
      const Shard& shard = table->shards[shard_of(hashes[i])];
      if (shard.slots.empty()) continue;
      const uint32_t held = shard.slots[shard.home(hashes[i])];
      if (held) __builtin_prefetch(&shard.ring[(held & PLACE_MASK) - 1]);
    }
    for (int64_t i = 0; i < size; i++) {
      Shard& shard = table->shards[shard_of(hashes[i])];
      const uint32_t slot = shard.find(group + i * NAME_NBYTES, hashes[i]);
      if (!take(begin + i, slot == NOWHERE ? nullptr : &shard.entry(slot))) return;
    }
  }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int disagg_block_names_version() { return 1; }

EXPORTED void* disagg_block_names_new() { return new (std::nothrow) Names(); }

EXPORTED void disagg_block_names_free(void* table) { delete static_cast<Names*>(table); }

EXPORTED uint64_t disagg_block_names_num(void* table) {
  const Names* self = static_cast<Names*>(table);
  return self->num_names - self->num_dead;
}

EXPORTED uint64_t disagg_block_names_nbytes(void* table) {
  const Names* self = static_cast<Names*>(table);
  uint64_t nbytes = sizeof(Names) + self->counts.capacity() * 5;
  for (const Shard& shard : self->shards) nbytes += shard.nbytes();
  return nbytes;
}

// The sets of names as runs of equal ones: sets[r] holds for the names before ends[r]; 0: they are
// not here. With `asks` only the leading names that are here, which are marked as looked up. Returns
// the number of runs.
EXPORTED int64_t disagg_block_names_runs(
    void* table, const char* names, int64_t num, int asks, uint32_t* sets, uint32_t* ends) {
  int64_t num_runs = 0;
  look_up(static_cast<Names*>(table), names, num, [&](int64_t i, Entry* entry) {
    if (asks && !entry) return false;
    const uint32_t set = entry ? entry->set & ~ASKED : 0;
    if (asks && !(entry->set & ASKED)) entry->set |= ASKED;
    if (!num_runs || sets[num_runs - 1] != set) sets[num_runs++] = set;
    ends[num_runs - 1] = uint32_t(i + 1);
    return true;
  });
  return num_runs;
}

// Gives names their sets, as runs; 0: removes them. Returns the number of all names.
EXPORTED uint64_t disagg_block_names_put(
    void* table, const char* names, int64_t num_runs, const uint32_t* sets, const uint32_t* ends) {
  Names* self = static_cast<Names*>(table);
  for (int64_t run = 0, i = 0; run < num_runs; run++)
    for (; i < ends[run]; i++) self->put(names + i * NAME_NBYTES, sets[run]);
  return self->num_names - self->num_dead;
}

// Evicts until there are at most so many names. Returns how many it has evicted.
EXPORTED uint64_t disagg_block_names_make_room(void* table, uint64_t max_names) {
  Names* self = static_cast<Names*>(table);
  const uint64_t before = self->num_names;
  while (self->num_names > max_names) {
    self->make_room_in(self->shards[self->hand]);
    self->hand = (self->hand + 1) % NUM_SHARDS;
  }
  return before - self->num_names;
}

// How many names each of `num` sets from `first` on has.
EXPORTED void disagg_block_names_counts(
    void* table, uint32_t first, uint32_t num, uint32_t* counts) {
  const Names* self = static_cast<Names*>(table);
  for (uint32_t i = 0; i < num; i++)
    counts[i] = first + i < self->counts.size() ? self->counts[first + i] : 0;
}

// Names with this set no longer count, and `purge` removes them; or they count again.
EXPORTED void disagg_block_names_kill(void* table, uint32_t set, int is_dead) {
  Names* self = static_cast<Names*>(table);
  self->count(set, 0);
  if (self->is_dead[set] == is_dead) return;
  self->is_dead[set] = is_dead;
  self->num_dead += is_dead ? self->counts[set] : -uint64_t(self->counts[set]);
}

EXPORTED void disagg_block_names_purge(void* table, uint32_t shard) {
  Names* self = static_cast<Names*>(table);
  self->purge(self->shards[shard]);
}
