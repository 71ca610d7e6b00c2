//! The `backstop` command.
use backstop::kernel::*;
fn main() -> anyhow::Result<()> {
    let (mut k, _ring) = Kernel::load(LoadOptions{max_destinations: 1000, ring_bytes: 1<<20, histograms: 64, policies: 16})?;
    println!("loaded settle={}", k.can_settle());
    let t = k.table();
    t.write_control(agent_common::Control{ mode: 2, agent_pid: std::process::id(), heartbeat_ns: clock::now().0, heartbeat_max_age_ns: 3_000_000_000_000, tick_ns: clock::tick_ns(), syn_linear: clock::syn_repeats_are_linear() as u32, reserved0: 0, reserved: [0;3]});
    k.set_policies(&[agent_common::Settings{connect_timeout_ms: 700, syn_timeout_ticks: agent_common::syn::first_timeout_ticks(700, clock::tick_ns(), true), gave_up_ms: 500, probe_limit: 1, policy: 0, flags: 0}], &[])?;
    let cg = std::path::PathBuf::from(std::env::args().nth(1).unwrap());
    k.attach(&cg)?;
    println!("attached");
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line)? > 0 {
        for (id,r) in t.used() {
            println!("{id:?} port {} addr {:?} netns {} att {} est {} inflight {} calls {} fail {} refused {} to {} unreach {} gaveup {} aband {} local {} other {} rej {} our {} late {} max {} hist {}", u16::from_be(r.key.port_be), r.key.addr, r.netns_inode, r.attempts, r.established, r.in_flight, r.connect_calls, r.connect_failures, r.failed_refused, r.failed_connect_timeout, r.failed_unreachable, r.failed_gave_up, r.abandoned, r.local, r.failed_other, r.rejected_breaker, r.timeouts_connect, r.late, r.connect_latency_max_us, r.histogram);
            if line.trim()=="trip" { t.set_verdict(id, agent_common::Verdict{generation: 1, errno: 111, state: 1}, core_now(60), 1); }
        }
        if line.trim()=="settle" { k.settle_namespace()?; }
        println!("lost {} .", t.lost_events());
        line.clear();
    }
    Ok(())
}
fn core_now(s: u64)->backstop::core::Nanos { backstop::core::Nanos(clock::now().0 + s*1_000_000_000) }
