//! Backstop's kernel programs: they look up a verdict, follow a connect to its outcome, and count.
//!
//! No policy lives here; every number comes from the agent. Whatever is missing (an entry, a
//! pointer, the agent's heartbeat), the connection passes.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![expect(
    internal_features,
    reason = "atomics that return the old value exist only there"
)]

mod adopt;
mod answers;
mod atomics;
mod begin;
mod body;
mod budgets;
mod connect;
mod counted;
mod ends;
mod events;
mod exchange;
mod follow;
mod head;
mod held;
mod idempotent;
mod keepalive;
mod kernel;
mod limits;
mod maps;
mod opaque;
mod outcome;
mod paces;
mod prints;
mod probes;
mod refusal;
mod release;
mod repeated;
mod request;
mod retries;
mod rows;
mod segment;
mod settle;
mod sockopt;
mod speaks;
mod stamps;
mod taken;
mod tls;
mod tried;
mod user_timeout;
mod whole;

/// Version of the ABI that this object was built with; the agent compares it with its own.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".rodata")]
static ABI_VERSION: u32 = agent_common::ABI_VERSION;

/// Some helpers are for programs under a licence compatible with the GPL only.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// A panic that the verifier could reach is a loop that it rejects.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
