// The names of cached KV blocks, each with the number of a set of workers that have it, and these
// sets as masks. The twin is `DictNames` of disagg/router/block_names.py, which is the
// specification; `CompiledNames` there calls the plain C interface at the end. It needs no special
// instruction set.
//
// There are 256 shards, so that growing and purging touch few names at a time. A shard keeps its
// entries in a ring in order of arrival, so that the oldest are first, and finds them by open
// addressing with linear probing. A slot is an entry's place plus one (24 bits) and 8 bits of its hash.
//
// If the system has no more memory, nothing fails: a shard that cannot grow forgets its oldest names.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace {

constexpr uint32_t NUM_SHARDS = 256, NAME_NBYTES = 16, GROUP = 16, WORD_BITS = 64;
constexpr uint32_t PLACE_BITS = 24, PLACE_MASK = (1u << PLACE_BITS) - 1;
constexpr uint32_t ASKED = 1u << 31, NOWHERE = ~0u, LEAST_ROOM = 8;
constexpr int64_t SPARED_AT_ONCE = 4096;  // in addition to one for each name put

// An array of a type without a constructor; new items are zero.
template <typename T>
class Array {
 public:
  Array() = default;
  Array(const Array&) = delete;
  ~Array() { free(items_); }

  // Returns false, and changes nothing, where there is no memory.
  bool resize(size_t size) {
    T* items = size ? static_cast<T*>(calloc(size, sizeof(T))) : nullptr;
    if (size && !items) return false;
    if (size && size_) memcpy(static_cast<void*>(items), items_, std::min(size, size_) * sizeof(T));
    free(items_);
    items_ = items;
    size_ = size;
    return true;
  }

  void swap(Array& other) {
    std::swap(items_, other.items_);
    std::swap(size_, other.size_);
  }

  T& operator[](size_t place) { return items_[place]; }
  const T& operator[](size_t place) const { return items_[place]; }
  size_t size() const { return size_; }
  size_t nbytes() const { return size_ * sizeof(T); }

 private:
  T* items_ = nullptr;
  size_t size_ = 0;
};

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
  Array<Entry> ring;
  Array<uint32_t> slots;
  uint32_t oldest = 0, num_used = 0, num_live = 0;  // used: with holes

  uint32_t home(uint64_t hash) const {
    return uint32_t((hash & 0xFFFFFFFF) * slots.size() >> 32);
  }

  uint32_t next(uint32_t slot) const { return slot + 1 == slots.size() ? 0 : slot + 1; }

  // The slot of a name; NOWHERE if the shard does not have it.
  uint32_t find(const char* name, uint64_t hash) const {
    if (!slots.size()) return NOWHERE;
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

  // Removes an entry without leaving a gap in a chain of slots.
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

  // Entries in order, without holes, in a ring of so many places. Returns false, and changes
  // nothing, where there is no memory.
  bool move_to(uint32_t num_places) {
    Array<Entry> moved;
    Array<uint32_t> unlinked;
    if (!moved.resize(num_places)) return false;
    if (!unlinked.resize(num_places ? num_places + num_places / 3 + 1 : 0)) return false;
    uint32_t num_moved = 0;
    for (uint32_t n = 0; n < num_used; n++) {
      const Entry& each = ring[(oldest + n) % ring.size()];
      if (each.set) moved[num_moved++] = each;
    }
    ring.swap(moved);
    slots.swap(unlinked);
    oldest = 0;
    num_used = num_live;
    for (uint32_t place = 0; place < num_live; place++) link(hash_of(ring[place].name), place);
    return true;
  }

  // Returns false if there is no place for one more entry.
  bool make_place() {
    const uint32_t room = ring.size();
    if (num_used < room) return true;
    if (num_live < room - room / 5) return move_to(room);  // there are enough holes
    const uint32_t wanted = std::max(room + room / 4, LEAST_ROOM);
    return wanted < PLACE_MASK && move_to(wanted);
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
};

struct Set {
  uint32_t num_names;
  bool is_dead;
};

struct Names {
  explicit Names(uint64_t max_names) : max_names(max_names) {}

  const uint64_t max_names;
  Shard shards[NUM_SHARDS];
  Array<Set> sets;
  Array<uint64_t> masks, held;  // by set; room for one mask
  size_t num_words = 0;         // of a mask
  uint64_t num_names = 0, num_dead = 0;
  uint32_t hand = 0;  // the shard from which names are evicted next
  int64_t num_spares = 0;  // names that may still be spared; the last eviction may spare more

  const uint64_t* mask(uint32_t set) const { return &masks[set * num_words]; }

  // Returns false, and changes nothing, where there is no memory.
  bool make_sets(size_t num_sets, size_t num_words_each) {
    Array<uint64_t> wider;
    if (!wider.resize(num_sets * num_words_each) || !held.resize(num_words_each)) return false;
    const size_t num_before = sets.size();
    if (!sets.resize(num_sets)) return false;
    for (size_t set = 0; num_words && set < num_before; set++)
      memcpy(&wider[set * num_words_each], mask(set), num_words * sizeof(uint64_t));
    masks.swap(wider);
    num_words = num_words_each;
    return true;
  }

  bool keep(uint32_t set, const char* mask, size_t nbytes) {
    const size_t wanted = (nbytes + sizeof(uint64_t) - 1) / sizeof(uint64_t);
    if (set >= sets.size() || wanted > num_words) {
      const size_t num_sets = set < sets.size() ? sets.size() : set + set / 4 + 64;
      if (!make_sets(num_sets, wanted > num_words ? wanted + wanted / 4 : num_words)) return false;
    }
    uint64_t* row = &masks[set * num_words];
    memset(row, 0, num_words * sizeof(uint64_t));
    memcpy(row, mask, nbytes);
    return true;
  }

  void count(uint32_t set, int change) {
    sets[set].num_names += change;
    num_names += change;
    if (sets[set].is_dead) num_dead += change;
  }

  // Returns how many names were evicted for it, itself included.
  uint64_t put(const char* name, uint32_t set) {
    const uint64_t hash = hash_of(name);
    Shard& shard = shards[shard_of(hash)];
    const uint32_t slot = shard.find(name, hash);
    if (slot != NOWHERE) {
      Entry& entry = shard.entry(slot);
      count(entry.set & ~ASKED, -1);
      if (!set) {
        shard.remove(slot);
        return 0;
      }
      entry.set = set | (entry.set & ASKED);
      count(set, 1);
      return 0;
    }
    if (!set) return 0;
    uint64_t num_evicted = 0;
    while (num_names && num_names >= max_names) {
      num_evicted += evict_from(shards[hand]);
      hand = (hand + 1) % NUM_SHARDS;
    }
    if (!shard.make_place()) num_evicted += evict_from(shard);
    if (shard.num_used == shard.ring.size()) return num_evicted + 1;
    shard.append(name, hash, set);
    count(set, 1);
    return num_evicted;
  }

  // Removes the oldest 64th of a shard, except for names that were looked up, which become the newest.
  // If too many were spared already, removes the oldest one, looked up or not. Names of dead sets are
  // always removed, and not counted.
  uint64_t evict_from(Shard& shard) {
    uint64_t num_evicted = 0;
    const bool spares = num_spares > 0;
    for (uint32_t left = spares ? (shard.num_live + 63) / 64 : 1; left && shard.num_live;) {
      const Entry oldest = shard.ring[shard.oldest];
      if (oldest.set) {
        shard.remove(shard.find(oldest.name, hash_of(oldest.name)));
        left--;
      }
      shard.oldest = (shard.oldest + 1) % shard.ring.size();
      shard.num_used--;
      if (!oldest.set) continue;
      const uint32_t set = oldest.set & ~ASKED;
      const bool is_dead = sets[set].is_dead;
      if (oldest.set & ASKED && !is_dead && spares) {
        shard.append(oldest.name, hash_of(oldest.name), set);
        num_spares--;
      } else {
        count(set, -1);
        num_evicted += !is_dead;
      }
    }
    return num_evicted;
  }

  void purge(Shard& shard) {
    for (uint32_t n = 0; n < shard.num_used; n++) {
      const Entry& each = shard.ring[(shard.oldest + n) % shard.ring.size()];
      const uint32_t set = each.set & ~ASKED;
      if (!set || !sets[set].is_dead) continue;
      shard.remove(shard.find(each.name, hash_of(each.name)));
      count(set, -1);
    }
    shard.shrink();
  }
};

// Calls `take(i, entry or nullptr)` for each name in order, until it returns false. The memory for the
// next names is prefetched.
template <typename Take>
void look_up(Names* table, const char* names, int64_t num, Take take) {
  uint64_t hashes[GROUP];
  Entry* entries[GROUP];
  for (int64_t begin = 0; begin < num; begin += GROUP) {
    const int64_t size = std::min<int64_t>(num - begin, GROUP);
    const char* group = names + begin * NAME_NBYTES;
    for (int64_t i = 0; i < size; i++) {
      hashes[i] = hash_of(group + i * NAME_NBYTES);
      const Shard& shard = table->shards[shard_of(hashes[i])];
      if (shard.slots.size()) __builtin_prefetch(&shard.slots[shard.home(hashes[i])]);
    }
    for (int64_t i = 0; i < size; i++) {
      const Shard& shard = table->shards[shard_of(hashes[i])];
      if (!shard.slots.size()) continue;
      const uint32_t held = shard.slots[shard.home(hashes[i])];
      if (held) __builtin_prefetch(&shard.ring[(held & PLACE_MASK) - 1]);
    }
    for (int64_t i = 0; i < size; i++) {
      Shard& shard = table->shards[shard_of(hashes[i])];
      const uint32_t slot = shard.find(group + i * NAME_NBYTES, hashes[i]);
      entries[i] = slot == NOWHERE ? nullptr : &shard.entry(slot);
      if (!entries[i]) continue;
      const uint64_t* mask = table->mask(entries[i]->set & ~ASKED);
      for (size_t word = 0; word < table->num_words; word += 8) __builtin_prefetch(mask + word);
    }
    for (int64_t i = 0; i < size; i++)
      if (!take(begin + i, entries[i])) return;
  }
}

// The workers that have all blocks so far, and how many blocks each of the others had.
struct Holders {
  uint64_t* held;
  size_t num_words;
  uint32_t *depths, *places;
  int64_t num_places = 0;

  // Removes the workers without the next block; without a mask, all. Returns whether any is left.
  bool narrow(const uint64_t* mask, uint32_t num_blocks) {
    uint64_t any = 0;
    for (size_t word = 0; word < num_words; word++) {
      const uint64_t left = mask ? held[word] & mask[word] : 0;
      for (uint64_t gone = num_blocks ? held[word] ^ left : 0; gone; gone &= gone - 1) {
        const uint32_t place = uint32_t(word * WORD_BITS) + __builtin_ctzll(gone);
        depths[place] = num_blocks;
        places[num_places++] = place;
      }
      any |= held[word] = left;
    }
    return any != 0;
  }
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int disagg_block_names_version() { return 2; }

EXPORTED void* disagg_block_names_new(uint64_t max_names) {
  return new (std::nothrow) Names(max_names);
}

EXPORTED void disagg_block_names_free(void* table) { delete static_cast<Names*>(table); }

EXPORTED uint64_t disagg_block_names_num(void* table) {
  const Names* self = static_cast<Names*>(table);
  return self->num_names - self->num_dead;
}

EXPORTED uint64_t disagg_block_names_nbytes(void* table) {
  const Names* self = static_cast<Names*>(table);
  uint64_t nbytes = sizeof(Names) + self->sets.nbytes() + self->masks.nbytes();
  for (const Shard& shard : self->shards) nbytes += shard.ring.nbytes() + shard.slots.nbytes();
  return nbytes;
}

// Stores which workers are in a set, as a mask of so many bytes, the lowest bits first. Returns 0 if
// there is not enough memory.
EXPORTED int disagg_block_names_keep(void* table, uint32_t set, const char* mask, uint64_t nbytes) {
  return static_cast<Names*>(table)->keep(set, mask, nbytes);
}

// Counts how many leading names each worker in the mask `alive` has. The counts (depths) are stored at
// the place of the worker's bit; they must be zero before. These names count as looked up. `places`
// gets the places of workers that have the first name, ordered by depth, smallest first. Returns the
// number of these workers.
EXPORTED int64_t disagg_block_names_match(
    void* table, const char* names, int64_t num, const char* alive, uint64_t nbytes,
    uint32_t* depths, uint32_t* places) {
  Names* self = static_cast<Names*>(table);
  if (!self->num_words) return 0;
  Holders holders{&self->held[0], self->num_words, depths, places};
  memset(holders.held, 0, self->held.nbytes());
  memcpy(holders.held, alive, std::min<uint64_t>(nbytes, self->held.nbytes()));
  uint32_t before = 0, num_found = 0;
  look_up(self, names, num, [&](int64_t i, Entry* entry) {
    if (!entry) return false;
    const uint32_t set = entry->set & ~ASKED;
    if (!(entry->set & ASKED)) entry->set |= ASKED;
    if (set != before && !holders.narrow(self->mask(set), uint32_t(i))) return false;
    before = set;
    num_found = uint32_t(i + 1);
    return true;
  });
  holders.narrow(nullptr, num_found);
  return holders.num_places;
}

// Of the places that `match` found, selects up to `most` whose bits are in the mask `among`, deepest
// first. Among equal ones it begins at `turn`, a fraction. Returns their number.
EXPORTED int64_t disagg_block_names_deepest(
    const uint32_t* depths, const uint32_t* places, int64_t num, const char* among, uint64_t nbytes,
    double turn, int64_t most, uint32_t* found) {
  int64_t num_found = 0;
  for (int64_t end = num, begin; end > 0; end = begin) {
    for (begin = end - 1; begin && depths[places[begin - 1]] == depths[places[end - 1]];) begin--;
    const int64_t size = end - begin, first = int64_t(turn * size);
    for (int64_t n = 0; n < size; n++) {
      const uint32_t place = places[begin + (first + n) % size];
      if (place / 8 >= nbytes || !(among[place / 8] >> place % 8 & 1)) continue;
      if (num_found == most) return num_found;
      found[num_found++] = place;
    }
  }
  return num_found;
}

// The sets of names, as runs of equal sets: sets[r] is the set of the names before ends[r]; 0 means
// that the names are unknown. Returns the number of runs.
EXPORTED int64_t disagg_block_names_runs(
    void* table, const char* names, int64_t num, uint32_t* sets, uint32_t* ends) {
  int64_t num_runs = 0;
  look_up(static_cast<Names*>(table), names, num, [&](int64_t i, Entry* entry) {
    const uint32_t set = entry ? entry->set & ~ASKED : 0;
    if (!num_runs || sets[num_runs - 1] != set) sets[num_runs++] = set;
    ends[num_runs - 1] = uint32_t(i + 1);
    return true;
  });
  return num_runs;
}

// Sets the sets of names, given as runs; 0 removes the names. Returns how many names were evicted.
EXPORTED uint64_t disagg_block_names_put(
    void* table, const char* names, int64_t num_runs, const uint32_t* sets, const uint32_t* ends) {
  Names* self = static_cast<Names*>(table);
  uint64_t num_evicted = 0;
  self->num_spares = SPARED_AT_ONCE + (num_runs ? ends[num_runs - 1] : 0);
  for (int64_t run = 0, i = 0; run < num_runs; run++)
    for (; i < ends[run]; i++) num_evicted += self->put(names + i * NAME_NBYTES, sets[run]);
  return num_evicted;
}

// The number of names of each of `num` sets from `first` on.
EXPORTED void disagg_block_names_counts(
    void* table, uint32_t first, uint32_t num, uint32_t* counts) {
  const Names* self = static_cast<Names*>(table);
  for (uint32_t i = 0; i < num; i++)
    counts[i] = first + i < self->sets.size() ? self->sets[first + i].num_names : 0;
}

// Marks a set as dead, so that its names no longer count and `purge` removes them; or as alive again.
EXPORTED void disagg_block_names_kill(void* table, uint32_t set, int is_dead) {
  Names* self = static_cast<Names*>(table);
  Set& its = self->sets[set];
  if (its.is_dead == bool(is_dead)) return;
  its.is_dead = is_dead;
  self->num_dead += is_dead ? its.num_names : -uint64_t(its.num_names);
}

EXPORTED void disagg_block_names_purge(void* table, uint32_t shard) {
  Names* self = static_cast<Names*>(table);
  self->purge(self->shards[shard]);
}
