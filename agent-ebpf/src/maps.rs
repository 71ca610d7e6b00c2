//! Every map, with its owner and size.
//!
//! Sizes given here are minima for tools that load the object by hand; the agent sets them at
//! load from its configuration. "Mapped" arrays are also memory of the agent (`BPF_F_MMAPABLE`,
//! kernel/bpf/arraymap.c): both sides see a store at once, without a system call.

use agent_common::{
    Control, Counters, DestinationKey, HeardAnswer, Lent, LentKey, PolicyKey, Retries,
    RetrySettings, Row, Settings, Stamp, Statuses,
    histogram::Histogram,
    key::ManualKey,
    lent::LENT_MOST,
    method::{ASKED_SLOTS, Asked},
    pace::{PACE_SLOTS, Pace},
    retry::{TASK_SLOTS, Task},
    spin::{SPIN_SLOTS, Spin},
    stamp::{CONNECTION_SLOTS, COUNTED_MOST, SPILLED_MOST, Slot},
    tried::{TRIED_SLOTS, Tried},
    whole::{MADE_SLOTS, Made, WHOLE_SLOTS, Whole},
    window::Block,
};
use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    macros::map,
    maps::{Array, HashMap, LpmTrie, PerCpuArray, Queue, RingBuf},
};

use crate::head::Head;

/// Mode, heartbeat. Written by the agent. Mapped, 64 bytes.
#[map]
pub static CONTROL: Array<Control> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Losses and the like. Written by the kernel. Mapped, 64 bytes.
#[map]
pub static COUNTERS: Array<Counters> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Key to index of its row. Entries are made by the kernel, removed by the agent.
/// `max_destinations` entries of about 100 bytes.
#[map]
pub static KEYS: HashMap<DestinationKey, u32> = HashMap::with_max_entries(16, 0);

/// The rows; 0 is the `other` row. Mapped, `max_destinations` + 1 entries of 576 bytes.
#[map]
pub static ROWS: Array<Row> = Array::with_max_entries(17, BPF_F_MMAPABLE);

/// The windows of connects, [`window_blocks`] entries for each row. Written by the kernel. Mapped,
/// 128 bytes an entry.
#[map]
pub static CONNECT_WINDOWS: Array<Block> = Array::with_max_entries(17, BPF_F_MMAPABLE);

/// The windows of exchanges, as those of connects.
#[map]
pub static EXCHANGE_WINDOWS: Array<Block> = Array::with_max_entries(17, BPF_F_MMAPABLE);

/// Blocks of each row's windows: set by the agent at load, a constant for the verifier.
#[unsafe(no_mangle)]
static WINDOW_BLOCKS: u32 = 1;

/// Blocks of each row's windows.
#[inline(always)]
pub fn window_blocks() -> u32 {
    // SAFETY: a read-only global, which the agent sets before the programs are loaded.
    unsafe { core::ptr::read_volatile(&raw const WINDOW_BLOCKS) }
}

/// Indexes of free rows: taken by the kernel, returned by the agent. 4 bytes an entry.
#[map]
pub static FREE_ROWS: Queue<u32> = Queue::with_max_entries(16, 0);

/// Pool of latency histograms, of connects and of responses, lent to rows. Mapped, 4,096 entries of 1.5 KB.
#[map]
pub static HISTOGRAMS: Array<Histogram> = Array::with_max_entries(16, BPF_F_MMAPABLE);

/// Free entries of [`HISTOGRAMS`]: taken by the kernel, returned by the agent. 4 bytes an entry.
#[map]
pub static FREE_HISTOGRAMS: Queue<u32> = Queue::with_max_entries(16, 0);

/// Settings of each policy. Written by the agent. Mapped, 56 bytes an entry.
#[map]
pub static POLICIES: Array<Settings> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Which policy, and whether protected: address prefixes by class and port. Written by the agent.
#[map]
pub static POLICY_TRIE: LpmTrie<PolicyKey, u32> =
    LpmTrie::with_max_entries(16_384, BPF_F_NO_PREALLOC);

/// Manual states for destinations that have no row yet: a packed verdict and when it ends.
/// Written by the agent, read when a row is created. 1,024 entries of 40 bytes.
#[map]
pub static MANUAL: HashMap<ManualKey, [u64; 2]> =
    HashMap::with_max_entries(1024, BPF_F_NO_PREALLOC);

/// When each process last established a connection, by process id modulo the size: process id in
/// the high half, milliseconds in the low. Approximate on purpose: a process whose entry another
/// one has taken merely loses the benefit of "had just established another connection".
#[map]
pub static RECENTLY_ESTABLISHED: Array<u64> = Array::with_max_entries(RECENT_SLOTS, 0);

/// Entries of [`RECENTLY_ESTABLISHED`]; a power of two.
pub const RECENT_SLOTS: u32 = 4096;

/// Budget and counters of retries, an entry for each row. Written by the kernel, but where said. Mapped,
/// 192 bytes an entry.
#[map]
pub static RETRIES: Array<Retries> = Array::with_max_entries(17, BPF_F_MMAPABLE);

/// What each policy says about retries. Written by the agent. Mapped, 48 bytes an entry.
#[map]
pub static RETRY_POLICIES: Array<RetrySettings> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// The statuses that each policy takes for failures. Written by the agent. Mapped, 32 bytes an entry.
#[map]
pub static STATUSES: Array<Statuses> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// What tasks know of their last calls, at the place that task and row name. Written by the kernel. 56
/// bytes an entry.
#[map]
pub static TASKS: Array<Task> = Array::with_max_entries(TASK_SLOTS, 0);

/// Tasks that were refused of late, at the place that the task names. Written by the kernel. 32 bytes an
/// entry.
#[map]
pub static SPINS: Array<Spin> = Array::with_max_entries(SPIN_SLOTS, 0);

/// How soon processes call again, at the place that process and row name. Written by the kernel. 48
/// bytes an entry.
#[map]
pub static PACES: Array<Pace> = Array::with_max_entries(PACE_SLOTS, 0);

/// What is known of the requests of connections, at the place that the socket's cookie names. Written by the
/// kernel. 24 bytes an entry.
#[map]
pub static ASKED: Array<Asked> = Array::with_max_entries(ASKED_SLOTS, 0);

/// How requests of processes ended, at the place that process, row and request name. Written by the kernel. 16
/// bytes an entry.
#[map]
pub static TRIED: Array<Tried> = Array::with_max_entries(TRIED_SLOTS, 0);

/// Requests that are compared byte for byte, at the place that the socket's cookie names. Written by the kernel. 40
/// bytes an entry.
#[map]
pub static WHOLES: Array<Whole> = Array::with_max_entries(WHOLE_SLOTS, 0);

/// Which of such requests processes have made, at the place that process, row and request name. Written by the
/// kernel. 16 bytes an entry.
#[map]
pub static MADE: Array<Made> = Array::with_max_entries(MADE_SLOTS, 0);

/// Failures and state changes for the agent. `ring_bytes`.
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);

/// DNS answers for the agent, in a ring of their own so that they push out no event. Room for some
/// hundred; what finds none is left out.
#[map]
pub static ANSWERS: RingBuf = RingBuf::with_byte_size(ANSWERS_BYTES, 0);

/// Size of [`ANSWERS`]; a power of two and a multiple of the page size.
const ANSWERS_BYTES: u32 = 1 << 17;
const _: () = assert!(ANSWERS_BYTES as usize > 64 * size_of::<HeardAnswer>());

/// How many answers were handed up in the current second: the second, and the count.
#[map]
pub static ANSWERS_HEARD: Array<u64> = Array::with_max_entries(1, 0);

/// Stamps of connections, by the socket's cookie. Written by the kernel. Mapped, 192 bytes an entry.
#[map]
pub static CONNECTIONS: Array<Slot> = Array::with_max_entries(CONNECTION_SLOTS, BPF_F_MMAPABLE);

/// Stamps of connections whose slot another socket has, by the socket's cookie. Written by the
/// kernel. Some 200 bytes an entry, taken only when used.
#[map]
pub static SPILLED: HashMap<u64, Stamp> =
    HashMap::with_max_entries(SPILLED_MOST, BPF_F_NO_PREALLOC);

/// Exchanges that were counted as failed while they hang, by the socket's cookie: which one, and
/// where it stands in the window ([`agent_common::stamp::pack_counted`]). Entries are made by the
/// agent and removed by whoever ends the exchange. Some 60 bytes an entry, taken only when used.
#[map]
pub static COUNTED: HashMap<u64, u64> = HashMap::with_max_entries(COUNTED_MOST, BPF_F_NO_PREALLOC);

/// The first bytes of an HTTP answer while the ingress hook searches them, and of a request while the
/// egress hook does. Two of 2.1 KB for each processor.
#[map]
pub static HEAD: PerCpuArray<Head> = PerCpuArray::with_max_entries(2, 0);

/// Control groups whose sockets are adopted, by id, with a process in each. Written by the agent,
/// emptied after the start.
#[map]
pub static WATCHED: HashMap<u64, u32> = HashMap::with_max_entries(32_768, BPF_F_NO_PREALLOC);

/// Options that the agent has set on programs' sockets. Entries are made and removed by the agent; by the
/// kernel when the program sets the option itself. Some 90 bytes an entry, taken only when used.
#[map]
pub static LENT: HashMap<LentKey, Lent> = HashMap::with_max_entries(LENT_MOST, BPF_F_NO_PREALLOC);
