//! The rule, against a plain model of it, with the real breakers behind.

use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::{
    core::{Action, DialTarget, Engine, Event, State},
    daemon::plan::Ticks,
    policy::Config,
};

const ADDRESSES: u8 = 3;
const NAMES: [&str; 2] = ["one.test", "two.test"];
const WORKLOADS: [&str; 2] = ["a", "b"];
const PORT: u16 = 80;

fn address(i: u8) -> Destination {
    Destination::new(IpAddr::from([10, 0, 0, i]), PORT, 0)
}

fn name(i: usize) -> DestinationArg {
    DestinationArg::Name {
        name: NAMES[i].to_owned(),
        port: PORT,
    }
}

fn plan() -> Plan {
    let ticks = Ticks {
        tick_ns: 4_000_000,
        syn_linear: true,
        window_calls: 32,
    };
    Plan::new(Config::default_config(), ticks)
}

/// An order of the model: all that were ever given are kept.
struct Ever {
    order: Standing,
    gone: bool,
}

/// Orders, breakers and what the kernel would do, with a plain list beside them.
struct World {
    orders: Orders,
    hosts: HostNames,
    plan: Plan,
    engine: Engine,
    now: Nanos,
    /// By index: the address and the workload.
    rows: HashMap<RowId, (u8, usize)>,
    ever: Vec<Ever>,
    out: Vec<Action>,
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            orders: Orders::default(),
            hosts: HostNames::default(),
            plan: plan(),
            engine: Engine::new(1),
            now: Nanos::from_secs(1000),
            rows: HashMap::new(),
            ever: Vec::new(),
            out: Vec::new(),
        };
        world.resolve(0, &[0, 1]);
        world.resolve(1, &[1, 2]);
        world
    }

    fn id(address: u8, workload: usize) -> RowId {
        RowId {
            index: u32::from(address) * 2 + workload as u32 + 1,
            incarnation: 1,
        }
    }

    fn names_of(&self, of: u8) -> Vec<KnownName> {
        self.hosts.of(EVERYWHERE, &address(of).addr_bytes())
    }

    fn handle(&mut self, event: Event<'_>) {
        self.engine.handle(event, self.now, &mut self.out);
        self.out.clear();
    }

    /// What the event thread does with an order.
    fn carry_out(&mut self, row: RowId, order: &Order) {
        let last_seqs = [0; 2];
        self.configure(row);
        match *order {
            Order::Trip(until, _) => self.handle(Event::Trip {
                row,
                until,
                last_seqs,
            }),
            Order::HoldClosed(until, _) => self.handle(Event::HoldClosed {
                row,
                until,
                last_seqs,
            }),
            Order::Lift(_) => self.handle(Event::Lift { row, last_seqs }),
            Order::Reset(_) => self.handle(Event::Reset { row, last_seqs }),
        }
    }

    /// Breakers that are quiet are not kept.
    fn configure(&mut self, row: RowId) {
        if self.engine.contains(row) {
            return;
        }
        let (to, workload) = self.rows[&row];
        let key = address(to).to_key(1 + workload as u64, 1);
        let target = DialTarget::from(&key);
        self.handle(Event::Configure {
            row,
            target,
            settings: Arc::default(),
            generation: 0,
        });
    }

    fn forced(&self, row: RowId) -> bool {
        matches!(
            self.engine.state(row),
            Some(State::ForcedOpen | State::ForcedClosed)
        )
    }

    fn tell(&mut self, rows: Vec<RowId>) {
        for row in rows {
            let (of, workload) = self.rows[&row];
            let (names, forced) = (self.names_of(of), self.forced(row));
            let order = self.orders.tell(
                row,
                &address(of),
                &names,
                WORKLOADS[workload],
                forced,
                self.now,
            );
            if let Some(order) = order {
                self.carry_out(row, &order);
            }
        }
    }

    /// Rows that are meant.
    fn meant(&self, wanted: &DestinationArg, workload: Option<&str>) -> Vec<RowId> {
        let is_it = |(_, (of, whose)): &(&RowId, &(u8, usize))| {
            let whose_is = workload.is_none_or(|wanted| wanted == WORKLOADS[*whose]);
            whose_is
                && match wanted {
                    DestinationArg::Address(address_meant) => *address_meant == address(*of),
                    DestinationArg::Name { name, .. } => {
                        self.names_of(*of).iter().any(|known| *known.name == **name)
                    }
                }
        };
        let mut rows: Vec<RowId> = self.rows.iter().filter(is_it).map(|(id, _)| *id).collect();
        rows.sort_unstable();
        rows
    }

    fn give(&mut self, destination: DestinationArg, workload: Option<usize>, trip: bool, ms: u64) {
        let workload = workload.map(|workload| WORKLOADS[workload].to_owned());
        let order = Standing {
            destination,
            workload,
            trip,
            until: self.now + Nanos::from_millis(ms),
            since: Timestamp::from_unix_ms(self.now.as_millis()),
            ends: Timestamp::from_unix_ms(self.now.as_millis() + ms),
            by: format!("uid 0, pid {}", self.ever.len()).into(),
        };
        for before in &mut self.ever {
            let of = &before.order;
            before.gone |= of.destination == order.destination && of.workload == order.workload;
        }
        self.ever.push(Ever {
            order: order.clone(),
            gone: false,
        });
        let rows = self.meant(&order.destination, order.workload.as_deref());
        self.orders.give(order);
        self.tell(rows);
    }

    fn reset(&mut self, wanted: &DestinationArg, workload: Option<usize>) {
        let workload = workload.map(|workload| WORKLOADS[workload]);
        // The model: the same words, and of a name its addresses, too.
        let is_of = |order: &Standing| match (&order.destination, wanted) {
            (DestinationArg::Address(address), DestinationArg::Name { name, .. }) => {
                let names = self.hosts.of(EVERYWHERE, &address.addr_bytes());
                names.iter().any(|known| *known.name == **name)
            }
            (ours, theirs) => ours == theirs,
        };
        let whose = |order: &Standing| workload.is_none() || order.workload.as_deref() == workload;
        for before in &mut self.ever {
            before.gone |= is_of(&before.order) && whose(&before.order);
        }
        // What the node does.
        let rows = self.meant(wanted, workload);
        let gone = self.orders.take_back(wanted, workload, &self.hosts);
        let (covered, free): (Vec<RowId>, Vec<RowId>) = rows.into_iter().partition(|row| {
            let (of, whose) = self.rows[row];
            let names = self.names_of(of);
            let order = self
                .orders
                .in_force(&address(of), &names, WORKLOADS[whose], self.now);
            order.is_some()
        });
        for row in free {
            self.orders.forget(row);
            self.carry_out(row, &Order::Reset(None));
        }
        self.tell(covered);
        self.tell_of(&gone);
    }

    fn tell_of(&mut self, gone: &[Standing]) {
        for order in gone {
            let rows = self.meant(&order.destination, None);
            self.tell(rows);
        }
        let rows = self.orders.told_of_gone();
        self.tell(rows);
    }

    /// What the loop does every 100 ms.
    fn tick(&mut self) {
        let changes = self.hosts.expire(self.now);
        self.renamed(&changes);
        let gone = self.orders.expire(self.now);
        self.tell_of(&gone);
    }

    fn renamed(&mut self, changes: &[crate::hosts::Change]) {
        let changed = |of: u8| {
            let bytes = address(of).addr_bytes();
            changes.iter().any(|change| change.place.1 == bytes)
        };
        let rows = self.rows.iter().filter(|(_, (of, _))| changed(*of));
        let rows = rows.map(|(id, _)| *id).collect();
        self.tell(rows);
    }

    fn resolve(&mut self, i: usize, addresses: &[u8]) {
        let addresses: Vec<IpAddr> = addresses.iter().map(|of| address(*of).addr()).collect();
        let changes = self.hosts.resolved(&NAMES[i].into(), &addresses, self.now);
        self.renamed(&changes);
    }

    /// The first connect of a workload to an address.
    fn connect(&mut self, to: u8, workload: usize) {
        let row = Self::id(to, workload);
        if self.rows.insert(row, (to, workload)).is_some() {
            return;
        }
        self.configure(row);
        // The kernel knows of no workloads; the agent does, a moment later.
        let entries = self.orders.entries(&self.hosts, &self.plan);
        let entry = entries.get(&address(to).to_manual_key());
        if let Some((verdict, until)) = entry.filter(|(_, until)| *until > self.now) {
            let order = match verdict.state {
                STATE_FORCED_OPEN => Order::Trip(*until, "".into()),
                _ => Order::HoldClosed(*until, "".into()),
            };
            self.carry_out(row, &order);
        }
        self.tell(vec![row]);
    }

    fn forget(&mut self, of: u8, workload: usize) {
        let row = Self::id(of, workload);
        // As with eviction: forced ones stay.
        if self.rows.contains_key(&row) && self.engine.evictable(row) {
            self.rows.remove(&row);
            self.handle(Event::Forget { row });
            self.orders.forget(row);
        }
    }

    /// The model's word for a row.
    fn expected(&self, of: u8, workload: usize) -> Option<&Standing> {
        let names = self.names_of(of);
        let mut newest = self.ever.iter().rev().filter(|ever| !ever.gone);
        newest
            .find(|Ever { order, .. }| {
                let covers = match &order.destination {
                    DestinationArg::Address(meant) => *meant == address(of),
                    DestinationArg::Name { name, .. } => {
                        names.iter().any(|known| *known.name == **name)
                    }
                };
                let whose = order.workload.as_deref();
                let is_whose = whose.is_none_or(|whose| whose == WORKLOADS[workload]);
                order.until > self.now && covers && is_whose
            })
            .map(|ever| &ever.order)
    }

    fn state_of(order: Option<&Standing>) -> State {
        match order {
            None => State::Closed,
            Some(order) if order.trip => State::ForcedOpen,
            Some(_) => State::ForcedClosed,
        }
    }

    fn check(&self) {
        for (row, (of, workload)) in &self.rows {
            let (expected, names) = (self.expected(*of, *workload), self.names_of(*of));
            let state = self.engine.state(*row).unwrap_or(State::Closed);
            assert_eq!(state, Self::state_of(expected), "{of} {workload}");
            // And it says whose it is, and until when.
            let shown = self
                .orders
                .in_force(&address(*of), &names, WORKLOADS[*workload], self.now);
            let of = |order: &Standing| (Arc::clone(&order.by), order.until);
            assert_eq!(shown.map(of), expected.map(of));
        }
        // Rows to come begin with what holds for all.
        let entries = self.orders.entries(&self.hosts, &self.plan);
        for to in 0..ADDRESSES {
            let names = self.names_of(to);
            let for_all =
                self.orders.all().rev().find(|order| {
                    order.workload.is_none() && order.covers(&address(to), &names, "")
                });
            let entry = entries.get(&address(to).to_manual_key());
            let forced_open = |trip| {
                if trip {
                    STATE_FORCED_OPEN
                } else {
                    STATE_FORCED_CLOSED
                }
            };
            assert_eq!(
                entry.map(|(verdict, _)| verdict.state),
                for_all.map(|order| forced_open(order.trip))
            );
        }
    }

    /// Time passes, and the loop looks every 100 ms. Between two orders nothing is let through.
    fn wait(&mut self, ms: u64) {
        let end = self.now + Nanos::from_millis(ms);
        while self.now < end {
            // Where nothing ends for long, fewer looks do.
            let soon = self.now + Nanos::from_secs(7);
            let ends = self.ever.iter().map(|ever| ever.order.until);
            let is_soon = ends.into_iter().any(|at| at > self.now && at <= soon);
            let step = if is_soon { 100 } else { 5_000 };
            self.now = end.min(self.now + Nanos::from_millis(step));
            self.handle(Event::Deadline);
            for (row, (of, workload)) in &self.rows {
                assert!(
                    self.expected(*of, *workload).is_none() || self.forced(*row),
                    "a gap for {of} {workload}"
                );
            }
            self.tick();
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Give(DestinationArg, Option<usize>, bool, u64),
    Reset(DestinationArg, Option<usize>),
    Connect(u8, usize),
    Forget(u8, usize),
    Resolve(usize, Vec<u8>),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let destination = || {
        prop_oneof![
            (0..ADDRESSES).prop_map(|i| DestinationArg::Address(address(i))),
            (0..NAMES.len()).prop_map(name),
        ]
    };
    let workload = || prop::option::of(0..WORKLOADS.len());
    let ms = || prop_oneof![4 => 1u64..5_000, 1 => Just(1000u64), 1 => 300_000u64..700_000];
    prop_oneof![
        8 => (destination(), workload(), any::<bool>(), ms())
            .prop_map(|(of, whose, trip, ms)| Op::Give(of, whose, trip, ms)),
        4 => (destination(), workload()).prop_map(|(of, whose)| Op::Reset(of, whose)),
        6 => (0..ADDRESSES, 0..WORKLOADS.len()).prop_map(|(to, whose)| Op::Connect(to, whose)),
        1 => (0..ADDRESSES, 0..WORKLOADS.len()).prop_map(|(to, whose)| Op::Forget(to, whose)),
        2 => (0..NAMES.len(), prop::collection::vec(0..ADDRESSES, 1..3))
            .prop_map(|(i, addresses)| Op::Resolve(i, addresses)),
        6 => prop_oneof![6 => 1u64..3_000, 1 => Just(310_000u64)].prop_map(Op::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_newest_order_that_covers_a_row_is_in_force(ops in prop::collection::vec(op(), 1..60)) {
        let mut world = World::new();
        for op in ops {
            match op {
                Op::Give(destination, workload, trip, ms) => {
                    world.give(destination, workload, trip, ms);
                }
                Op::Reset(wanted, workload) => world.reset(&wanted, workload),
                Op::Connect(to, workload) => world.connect(to, workload),
                Op::Forget(of, workload) => world.forget(of, workload),
                Op::Resolve(i, addresses) => world.resolve(i, &addresses),
                Op::Wait(ms) => world.wait(ms),
            }
            world.check();
        }
    }
}

fn to(i: u8) -> DestinationArg {
    DestinationArg::Address(address(i))
}

/// An order for all, and a newer one for a workload that nobody has seen yet.
#[test]
fn the_order_for_one_workload_goes_before_the_older_one_for_all() {
    let mut world = World::new();
    world.give(to(0), None, true, 8_000);
    world.give(to(0), Some(0), false, 60_000);
    world.connect(0, 0);
    world.connect(0, 1);
    let states = |world: &World| [0, 1].map(|whose| world.engine.state(World::id(0, whose)));
    let both = [Some(State::ForcedClosed), Some(State::ForcedOpen)];
    assert_eq!(states(&world), both);
    world.wait(9_000);
    let one = [Some(State::ForcedClosed), Some(State::Closed)];
    assert_eq!(states(&world), one);
    // The other way round, and the older one outlasts the newer.
    let mut world = World::new();
    world.give(to(0), None, false, 60_000);
    world.give(to(0), Some(0), true, 8_000);
    world.connect(0, 0);
    assert_eq!(states(&world)[0], Some(State::ForcedOpen));
    world.wait(9_000);
    assert_eq!(states(&world)[0], Some(State::ForcedClosed));
    let row = world.orders.concerning(None, None, &world.hosts).next();
    assert_eq!(
        row.map(|(order, rows)| (order.trip, rows)),
        Some((false, 1))
    );
}

#[test]
fn a_reset_by_name_takes_back_what_was_ordered_by_address_and_not_the_other_way_round() {
    let mut world = World::new();
    for i in 0..ADDRESSES {
        world.connect(i, 0);
        world.give(to(i), None, true, 60_000);
    }
    world.reset(&name(0), None);
    let states = |world: &World| [0, 1, 2].map(|i| world.engine.state(World::id(i, 0)));
    let (forced, closed) = (Some(State::ForcedOpen), Some(State::Closed));
    assert_eq!(states(&world), [closed, closed, forced]);
    world.give(name(0), None, true, 60_000);
    world.reset(&to(0), None);
    assert_eq!(states(&world), [forced, forced, forced]);
    let meant = to(0);
    let left = world.orders.concerning(Some(&meant), None, &world.hosts);
    let left: Vec<_> = left.collect();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].0.destination, name(0));
}

#[test]
fn there_is_room_for_so_many_and_one_more_of_the_same_words() {
    let mut world = World::new();
    let order = |i: usize| Standing {
        destination: DestinationArg::Name {
            name: format!("n{i}.test"),
            port: PORT,
        },
        workload: None,
        trip: true,
        until: Nanos::from_secs(2000),
        since: Timestamp::from_unix_ms(0),
        ends: Timestamp::from_unix_ms(1),
        by: "uid 0".into(),
    };
    for i in 0..MOST {
        assert!(world.orders.has_room(&order(i)), "{i}");
        world.orders.give(order(i));
    }
    assert!(!world.orders.has_room(&order(MOST)));
    assert!(world.orders.has_room(&order(7)));
    let before = world.orders.give(order(7));
    assert_eq!(world.orders.all().count(), MOST);
    assert_eq!(
        world.orders.all().last().map(|o| o.destination.to_string()),
        Some("n7.test:80".to_owned())
    );
    world.orders.give_back(before);
    assert_eq!(
        world
            .orders
            .all()
            .next_back()
            .map(|o| o.destination.to_string()),
        Some("n1023.test:80".to_owned())
    );
}
