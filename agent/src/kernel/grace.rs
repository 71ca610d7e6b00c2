//! Waiting until no program run from before is still under way.

/// Longest that a program run can take on any kernel in practice, for kernels without the command.
const LONG: std::time::Duration = std::time::Duration::from_millis(100);

/// Waits until every program run that has begun before the call has ended: MEMBARRIER_CMD_GLOBAL is
/// a `synchronize_rcu()` (kernel/sched/membarrier.c), and programs run inside an RCU read section
/// (kernel/bpf/cgroup.c, `bpf_prog_run_array_cg`). Takes some 10 ms.
pub fn wait_for_programs() {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: no memory is passed.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result != 0 {
        // Not with nohz_full CPUs.
        std::thread::sleep(LONG);
    }
}
