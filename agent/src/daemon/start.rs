//! `backstop run`: from the command line to the `ready` line, the loop, and the way out.

mod said;
mod turns;
mod usage;

use std::{
    fs,
    io::Write as _,
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, mpsc as std_mpsc},
    time::Duration,
};

use agent_common::{Control, Mode};
use anyhow::{Context as _, Result, bail};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    task::JoinHandle,
};

use super::{
    adopt,
    backend::Handle,
    canary::{self, Hidden, Proof},
    dialer,
    ends::Ends,
    journal::Journal,
    memo, memory,
    named::{self, Naming},
    node::{Node, Source, kernel_mode},
    pause::Pause,
    plan::{Plan, Ticks, window_calls},
    priority,
    reactor::{HEARTBEAT_MAX_AGE, Reactor},
    takeover::{Live, not_taken_over},
    waiting::Waiting,
    watch::{Change, Watch},
};
use crate::{
    cli::{EXIT_DONE, EXIT_FAILED, EXIT_KERNEL, EXIT_USAGE, RunArgs},
    control::{
        api,
        client::too_long,
        server::{Limits, serve_control, serve_http},
    },
    hosts::{HostNames, listener, resolver::Found, resolver::Resolver},
    kernel::{
        Kernel, LoadOptions,
        cgroup::{self, Names},
        clock,
        support::{self, Unsupported},
    },
    policy::{self, MAX_POLICIES},
};
use said::{logging, started};
use turns::{changed, every, finished, prove, reload, watchdog};
use usage::{Usage, cgroups, writable};

/// Latency histograms to lend to rows at most: two a row, one for connects and one for exchanges.
pub(super) const HISTOGRAMS: u32 = 4096;
/// How often rows, losses, pauses and calls are looked at.
const TICK: Duration = Duration::from_millis(100);
/// So long the start waits for names in the configuration to be looked up.
const FIRST_NAMES: Duration = Duration::from_secs(2);
/// So long the end waits for those who follow the events to get the last of them.
const LAST_LINES: Duration = Duration::from_millis(50);
/// How often enforcement is proven again.
const PROVE_EVERY: Duration = Duration::from_secs(30);
/// How often cgroups are looked for that have vanished or returned.
const CGROUPS_EVERY: Duration = Duration::from_secs(1);

/// Runs the agent until it is told to stop; returns the exit code.
pub fn run(args: RunArgs) -> ExitCode {
    let code = match start(args) {
        Ok(()) => EXIT_DONE,
        Err(error) => {
            let mut stderr = std::io::stderr();
            // With stderr gone there is nobody left to tell.
            let _ = writeln!(stderr, "backstop: {error:#}");
            if error.is::<Usage>() {
                EXIT_USAGE
            } else if error.is::<Unsupported>() {
                EXIT_KERNEL
            } else {
                EXIT_FAILED
            }
        }
    };
    ExitCode::from(code)
}

fn start(args: RunArgs) -> Result<()> {
    memory::keep_large_apart();
    if let Some(longest) = too_long(&args.socket) {
        return Err(Usage(longest).into());
    }
    let source = Source {
        file: args.config.clone(),
        mode: args.mode.map(|mode| match mode {
            api::Mode::Enforce => policy::Mode::Enforce,
            api::Mode::Observe => policy::Mode::Observe,
        }),
    };
    let config = source.read().map_err(|error| Usage(error.to_string()))?;
    logging(config.agent.log);
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    support::check()?;
    let mount = cgroup::mount_point()?;
    let cgroups = cgroups(&args.cgroups, &mount)?;
    fs::create_dir_all(&args.state_dir)
        .and_then(|()| writable(&args.state_dir))
        .with_context(|| {
            format!(
                "state directory {}: not writable; choose another with --state-dir",
                args.state_dir.display()
            )
        })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    let result = runtime.block_on(serve(args, source, config, mount, cgroups));
    // A canary that a frozen cgroup holds up must not hold up the end.
    runtime.shutdown_background();
    result
}

async fn serve(
    args: RunArgs,
    source: Source,
    config: policy::Config,
    mount: PathBuf,
    cgroups: Vec<PathBuf>,
) -> Result<()> {
    // Whoever is live on the socket keeps it, and its cgroups, before anything is loaded.
    let mut live = match args.takeover {
        true => Live::find(&args.socket).await?,
        false => None,
    };
    let mut ends = match &live {
        Some(live) => {
            let (pid, version) = (live.pid, &live.version);
            tracing::info!(pid, version, "taking over from the agent that is live");
            None
        }
        None => Some(Ends::open(&args).await?),
    };
    let mut pause = Pause::restore(&args.state_dir)?;
    if let Some(paused) = live.as_ref().and_then(|live| live.paused.clone()) {
        // It may be kept in another state directory.
        pause.begin(paused)?;
    }
    let mut remembered = match &live {
        // Its state is asked for when it is wanted: until then it changes.
        Some(_) => None,
        None => memo::file::read_both(&args.state_dir, clock::now())?,
    };
    let ordered = match (&live, &remembered) {
        (Some(live), _) => live.names.clone(),
        (None, Some(document)) => document.names(),
        (None, None) => Vec::new(),
    };
    if let Err(error) = priority::install() {
        tracing::warn!("{error:#}");
    }

    // While the programs are loaded, names are looked up.
    let (mut resolver, mut found) = Resolver::start()?;
    let had_orders = !ordered.is_empty();
    let mut wanted = config.exact_names();
    for name in ordered {
        if !wanted.contains(&name) {
            wanted.push(name);
        }
    }
    resolver.look_up(wanted);
    let ticks = Ticks {
        tick_ns: clock::tick_ns(),
        syn_linear: clock::syn_repeats_are_linear(),
        window_calls: window_calls(&config),
    };
    let (mut kernel, ring) = Kernel::load(LoadOptions {
        max_destinations: config.agent.max_destinations,
        ring_bytes: config.agent.ring_bytes,
        window_calls: ticks.window_calls,
        histograms: HISTOGRAMS.min(2 * config.agent.max_destinations),
        policies: MAX_POLICIES as u32 + 1,
    })?;
    // The kernel's type information took some 30 MB.
    memory::give_back();
    let table = kernel.table();
    let events_kept = config.agent.events_kept as usize;
    let mode = config.mode;
    let plan = Arc::new(Plan::new(config, ticks));
    let mut heard = match kernel.take_answers() {
        Some(ring) => listener::start(ring)?,
        None => bail!("the ring of DNS answers is in use"),
    };
    let (hosts, not_found) = first_names(&resolver, &mut found).await;
    let named_entries = named::entries(&plan, &hosts);
    let entries = [plan.entries.as_slice(), named_entries.as_slice()].concat();
    kernel.set_policies(&plan.settings, &plan.retries, &plan.statuses, &entries)?;
    let mut naming = Naming::new(hosts, resolver, named_entries);
    table.write_control(Control {
        mode: Mode::OFF,
        agent_pid: std::process::id(),
        heartbeat_ns: clock::now().0,
        heartbeat_max_age_ns: HEARTBEAT_MAX_AGE.0,
        tick_ns: ticks.tick_ns,
        syn_linear: u32::from(ticks.syn_linear),
        reserved0: 0,
        reserved: [0; 3],
    });
    let (dials, orders) = std_mpsc::channel();
    let drains = std_mpsc::channel();
    let hidden = Hidden::default();
    let seed = clock::now().0 ^ (u64::from(std::process::id()) << 32);
    let (reactor, mut notices) = Reactor::start(
        ring,
        Arc::clone(&table),
        Arc::clone(&plan),
        dials,
        drains.0.clone(),
        hidden.clone(),
        seed,
    )?;
    dialer::start(orders, reactor.commander())?;
    let mut waiting = Waiting::start(
        Arc::clone(&table),
        kernel.connections(),
        Arc::clone(&plan),
        hidden.clone(),
        reactor.commander(),
        kernel.lent(),
        drains,
    )?;
    if live.is_some() {
        // Until the agent before has ended, these are its business.
        waiting.plan(Arc::new(plan.without_waits()));
    }
    kernel.set_options_lent(plan.sets_options());
    let journal = Arc::new(Journal::new(events_kept));
    let (handle, mut requests) = Handle::new(Arc::clone(&journal), Arc::clone(&table));
    if let Some(before) = &live {
        match before.state().await {
            Ok(document) => remembered = Some(document),
            Err(error) if before.is_gone().await => {
                tracing::debug!("{error:#}");
                tracing::warn!(
                    pid = before.pid,
                    "the agent that was to be taken over from has ended; this one starts as an ordinary one, \
                     with what is in the state directory"
                );
                live = None;
                ends = Some(Ends::open(&args).await?);
                remembered = memo::file::read_both(&args.state_dir, clock::now())?;
            }
            Err(error) => return Err(not_taken_over(error, &args.socket)),
        }
    }
    let keeper = memo::keeper::Keeper::start(args.state_dir.clone())?;
    let restored = match remembered {
        Some(document) => {
            let commander = reactor.commander();
            let ground = memo::restore::Ground {
                kernel: &mut kernel,
                plan: &plan,
                mount: &mount,
                cgroups: &cgroups,
                naming: &mut naming,
                commander: &commander,
            };
            memo::restore::restore(document, ground).await
        }
        None => memo::restore::Restored::default(),
    };
    // From here on a signal must not end the process without settling.
    let mut hangup = signal(SignalKind::hangup()).context("wait for SIGHUP")?;
    let mut terminate = signal(SignalKind::terminate()).context("wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("wait for SIGINT")?;
    for path in &cgroups {
        canary::sweep(path);
        kernel.attach(path)?;
    }
    if live.is_some() {
        // From here on both refuse.
        table.set_mode(kernel_mode(&pause, mode));
    }
    adopt::adopt(&mut kernel, &cgroups);
    let file = source.file.clone();
    let mut node = Node::new(
        kernel,
        reactor,
        waiting,
        journal,
        Arc::clone(&handle),
        plan,
        source,
        ticks,
        Names::new(mount),
        cgroups,
        pause,
        hidden,
        keeper,
        restored,
        naming,
    );
    if had_orders || !node.orders.is_idle() {
        // Names of those orders that came back, and no others.
        node.look_up_names();
    }
    node.adopted();
    table.set_mode(node.kernel_mode());
    let proofs = prove(&node).await.context("wait for the canaries")?;
    if let Err(error) = node.proven(proofs) {
        node.stop();
        return Err(error);
    }
    let ends = match (ends, live) {
        (Some(ends), _) => Ok(ends),
        (None, Some(live)) => Ends::take_over(&live, &args).await,
        (None, None) => Ends::open(&args).await,
    };
    let ends = match ends {
        Ok(ends) => ends,
        Err(error) => {
            node.stop();
            return Err(error);
        }
    };
    node.warn_of_neighbours();
    node.waiting.plan(Arc::clone(&node.plan));
    node.ready_at = clock::now();

    let listening = ends.listening()?;
    let Ends {
        control,
        socket: _socket,
        http,
        state: _state,
    } = ends;
    let limits = Limits::default();
    let backend: Arc<dyn crate::control::Backend> = handle;
    tokio::spawn(serve_control(control, Arc::clone(&backend), limits));
    if let Some(listener) = http {
        tokio::spawn(serve_http(listener, backend, limits));
    }
    let mut watch = match &file {
        Some(file) => Some(Watch::new(file)?),
        None => None,
    };
    started(&mut node, &args, mode, &listening)?;
    for name in not_found {
        node.found(name);
    }

    let mut tick = every(TICK);
    let mut prove_again = every(PROVE_EVERY);
    let mut check_cgroups = every(CGROUPS_EVERY);
    prove_again.reset();
    let mut proofs: Option<JoinHandle<Vec<Proof>>> = None;
    loop {
        tokio::select! {
            Some(notice) = notices.recv() => {
                node.notice(notice);
                // Many at a time: each turn of the loop costs more than a notice.
                for _ in 0..256 {
                    match notices.try_recv() {
                        Ok(notice) => node.notice(notice),
                        Err(_) => break,
                    }
                }
            }
            Some(found) = found.recv() => node.found(found),
            Some(said) = heard.recv() => {
                node.heard(&said);
                for _ in 0..64 {
                    match heard.try_recv() {
                        Ok(said) => node.heard(&said),
                        Err(_) => break,
                    }
                }
                // Now, not with the next tick: the connect follows at once.
                node.follow_names(clock::now());
            }
            Some(request) = requests.recv() => {
                node.request(request).await;
                if node.handed_over {
                    // The answer has to get out first.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    break;
                }
            }
            _ = tick.tick() => {
                node.tick().await;
                watchdog(&node);
            }
            // One round at a time: a frozen cgroup may hold it up.
            _ = prove_again.tick(), if proofs.is_none() => proofs = Some(prove(&node)),
            found = finished(&mut proofs) => {
                proofs = None;
                // A failure is an event, and shows in /readyz.
                let _ = node.proven(found);
            }
            _ = check_cgroups.tick() => node.check_cgroups(),
            _ = hangup.recv() => reload(&mut node),
            change = changed(&mut watch) => match change {
                Change::Contents => reload(&mut node),
                Change::Gone(error) => node.file_is_gone(&error),
            },
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
        if !node.reactor.is_running() || !node.waiting.is_running() {
            node.stop();
            bail!("a thread of the agent has ended unexpectedly; everything is detached");
        }
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    // What has happened until now is told.
    while let Ok(notice) = notices.try_recv() {
        node.notice(notice);
    }
    node.stop();
    if node.journal.end() {
        // On this thread the followers' lines get out meanwhile.
        tokio::time::sleep(LAST_LINES).await;
    }
    tracing::info!("stopped: every option is given back, nothing stays attached");
    Ok(())
}

/// What the agent's first round of look-ups finds and what it does not, as far as it is in time: a resolver that does not
/// answer must not keep the agent from starting.
async fn first_names(
    resolver: &Resolver,
    found: &mut mpsc::Receiver<Found>,
) -> (HostNames, Vec<Found>) {
    let (mut hosts, mut not_found) = (HostNames::default(), Vec::new());
    if resolver.names().is_empty() {
        return (hosts, not_found);
    }
    let round = async {
        while let Some(found) = found.recv().await {
            match found {
                Found::Addresses(name, addresses) => {
                    hosts.resolved(&name, &addresses, clock::now());
                }
                Found::Failed(..) => not_found.push(found),
                Found::RoundEnded => return,
            }
        }
    };
    if tokio::time::timeout(FIRST_NAMES, round).await.is_err() {
        tracing::warn!(
            "not every name in the configuration could be looked up within {} s; what is said about the \
             others holds as soon as they are",
            FIRST_NAMES.as_secs()
        );
    }
    (hosts, not_found)
}
