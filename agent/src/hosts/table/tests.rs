use proptest::prelude::*;

use super::*;

const NETNS: u64 = 7;

fn at(secs: u64) -> Nanos {
    Nanos::from_secs(1000 + secs)
}

fn addr(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

fn place(last: u8) -> Place {
    (NETNS, bytes(addr(last)))
}

fn answer(names: &[&str], addresses: &[u8], ttl: u64) -> Answer {
    Answer {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        addresses: addresses.iter().map(|last| addr(*last)).collect(),
        ttl: Duration::from_secs(ttl),
    }
}

struct Story(HostNames);

impl Story {
    fn heard(&mut self, names: &[&str], addresses: &[u8], secs: u64) -> Vec<Change> {
        self.0.heard(NETNS, &answer(names, addresses, 60), at(secs))
    }

    fn of(&self, last: u8) -> Vec<String> {
        let names = self.0.of(NETNS, &bytes(addr(last)));
        names.iter().map(|known| known.name.to_string()).collect()
    }
}

fn story() -> Story {
    Story(HostNames::default())
}

fn new_owner(last: u8) -> Change {
    Change {
        place: place(last),
        new_owner: true,
    }
}

fn change(last: u8) -> Change {
    Change {
        place: place(last),
        new_owner: false,
    }
}

/// As after a restart at that time.
fn restored(story: &Story, secs: u64) -> Story {
    let mut after = HostNames::default();
    after.restore(story.0.told(), at(secs));
    Story(after)
}

#[test]
fn what_was_told_comes_back_with_the_time_that_is_left() {
    let mut story = story();
    story.heard(&["db.internal", "a.internal"], &[1, 2], 0);
    story.heard(&["web.internal"], &[1], 1);
    // Round robin: the second address holds on until its minute is over.
    story.heard(&["db.internal", "a.internal"], &[1], 10);
    let name: Arc<str> = "own.internal".into();
    story.0.resolved(&name, &[addr(3)], at(0));
    let mut after = restored(&story, 20);
    assert_eq!(after.of(1), ["db.internal", "web.internal", "a.internal"]);
    assert_eq!(after.of(2), story.of(2));
    assert!(after.0.own().is_empty(), "it looks up for itself");
    assert_eq!(after.0.len(), 5);
    assert_eq!(after.0.count(NETNS, "db.internal", false), 2);
    assert!(after.0.expire(at(60)).is_empty(), "until then they hold");
    assert_eq!(after.0.expire(at(61)), [change(2)]);
    assert_eq!(after.of(1), ["db.internal", "web.internal", "a.internal"]);
    assert!(after.0.told().iter().all(|told| told.addr == place(1).1));
    // A second time it changes nothing, nor does it take away what was heard since.
    let mut again = restored(&story, 20);
    again.heard(&["web.internal"], &[1], 21);
    again.0.restore(story.0.told(), at(22));
    assert_eq!(again.0.len(), 5);
    assert!(again.0.told().iter().any(|told| told.seen == at(21)));
}

#[test]
fn a_namespace_that_is_gone_takes_its_names_along() {
    let mut story = story();
    story.heard(&["db.internal", "a.internal"], &[1, 2], 0);
    let hosts = &mut story.0;
    hosts.heard(8, &answer(&["db.internal"], &[1], 60), at(0));
    hosts.resolved(&"own.internal".into(), &[addr(1)], at(0));
    let mut namespaces: Vec<u64> = hosts.namespaces().collect();
    namespaces.sort_unstable();
    assert_eq!(namespaces, [EVERYWHERE, NETNS, 8]);
    let mut changes = hosts.forget(&HashSet::from([NETNS, 9]));
    changes.sort_unstable_by_key(|change| change.place);
    assert_eq!(changes, [change(1), change(2)]);
    assert_eq!(hosts.len(), 2);
    assert_eq!(hosts.namespaces().count(), 2);
    assert!(hosts.told().iter().all(|told| told.netns == 8));
    assert_eq!(story.of(1), ["own.internal"]);
    // Another one with the same cookie does not exist; if it did, it would begin with nothing.
    assert_eq!(story.heard(&["db.internal"], &[1], 1), [change(1)]);
}

#[test]
fn a_list_of_any_kind_keeps_the_bounds() {
    let told = |netns, last: u32, name: u32| Told {
        netns,
        addr: bytes(std::net::Ipv4Addr::from(last).into()),
        name: format!("n{name}.internal").into(),
        asked: true,
        since: Nanos(u64::MAX),
        seen: Nanos(u64::MAX),
        until: Nanos(u64::MAX),
        newest: Nanos(u64::MAX),
    };
    let mut hosts = HostNames::default();
    hosts.restore((0..20).map(|name| told(NETNS, 1, name)), at(0));
    assert_eq!(hosts.len(), MOST_NAMES);
    hosts.restore([told(EVERYWHERE, 2, 1)], at(0));
    assert!(hosts.own().is_empty());
    for netns in 1..9 {
        hosts.restore((0..5000).map(|last| told(netns, last, 1)), at(0));
        assert!(
            hosts
                .told()
                .iter()
                .filter(|told| told.netns == netns)
                .count()
                <= MOST_PER_NAMESPACE
        );
    }
    assert_eq!(hosts.len(), MOST);
    let latest = at(0) + Nanos(LONGEST.as_nanos() as u64);
    let sane = |told: &Told| told.seen <= at(0) && told.until <= latest && told.newest <= at(0);
    assert!(hosts.told().iter().all(sane));
    // Newer answers take their places, as ever.
    assert!(
        !hosts
            .heard(NETNS, &answer(&["new.internal"], &[9], 60), at(1))
            .is_empty()
    );
}

#[test]
fn a_name_and_its_alias() {
    let mut story = story();
    let changes = story.heard(&["db.internal", "db-1.internal"], &[5, 6], 0);
    assert_eq!(changes, [change(5), change(6)]);
    assert_eq!(story.of(5), ["db.internal", "db-1.internal"]);
    // What is known already is no change; neither is an alias that is asked for by itself... but its rank.
    assert_eq!(
        story.heard(&["db.internal", "db-1.internal"], &[5, 6], 1),
        []
    );
    assert_eq!(story.heard(&["db-1.internal"], &[5], 2), [change(5)]);
    assert_eq!(story.of(7), [""; 0]);
    assert_eq!(story.0.of(NETNS + 1, &bytes(addr(5))), []);
    assert_eq!(story.0.places("db.internal"), [place(5), place(6)]);
}

#[test]
fn round_robin_takes_nothing_away() {
    let mut story = story();
    for secs in 0..600 {
        let one = (secs % 3) as u8;
        story.heard(&["web"], &[one], secs);
        story.0.expire(at(secs));
    }
    for one in 0..3 {
        assert_eq!(story.of(one), ["web"], "{one}");
    }
}

#[test]
fn who_resolves_once_keeps_the_name() {
    let mut story = story();
    story.heard(&["db"], &[5], 0);
    assert_eq!(story.0.expire(at(1_000_000)), []);
    assert_eq!(story.of(5), ["db"]);
}

#[test]
fn an_answer_without_it_takes_the_name_once_its_time_is_over() {
    let mut story = story();
    story.heard(&["db"], &[5], 0);
    story.heard(&["db"], &[6], 30);
    assert_eq!(story.0.expire(at(60)), []);
    assert_eq!(story.0.expire(at(61)), [change(5)]);
    assert_eq!(story.of(5), [""; 0]);
    assert_eq!(story.of(6), ["db"]);
}

#[test]
fn an_answer_of_the_other_family_says_nothing() {
    let mut story = story();
    story.heard(&["db"], &[5], 0);
    let mut six = answer(&["db"], &[], 60);
    six.addresses = vec!["2001:db8::1".parse().unwrap()];
    story.0.heard(NETNS, &six, at(100));
    assert_eq!(story.0.expire(at(1000)), []);
    assert_eq!(story.of(5), ["db"]);
}

#[test]
fn an_address_that_goes_to_another_name_has_a_new_owner() {
    let mut story = story();
    story.heard(&["db"], &[5], 0);
    story.heard(&["db"], &[6], 100);
    assert_eq!(story.0.expire(at(101)), [change(5)]);
    // Back to the same name: nothing happened.
    story.heard(&["db"], &[5], 200);
    story.heard(&["db"], &[6], 300);
    assert_eq!(story.0.expire(at(301)), [change(5)]);
    assert_eq!(story.heard(&["db"], &[5], 302), [change(5)]);
    story.heard(&["db"], &[6], 400);
    story.0.expire(at(401));
    assert_eq!(story.heard(&["cache"], &[5], 402), [new_owner(5)]);
    // Said once.
    assert_eq!(story.heard(&["cache"], &[5], 403), []);
}

#[test]
fn so_it_has_where_the_new_name_comes_before_the_old_one_ends() {
    let mut story = story();
    story.heard(&["db"], &[5], 0);
    story.heard(&["db"], &[6], 10);
    assert_eq!(story.heard(&["cache"], &[5], 20), [change(5)]);
    assert_eq!(story.0.expire(at(61)), [new_owner(5)]);
    assert_eq!(story.of(5), ["cache"]);
}

#[test]
fn an_address_that_names_share_keeps_its_owner() {
    let mut story = story();
    for secs in (0..300).step_by(30) {
        story.heard(&["a"], &[5], secs);
        story.heard(&["b"], &[5], secs + 1);
        assert_eq!(story.0.expire(at(secs + 2)), []);
    }
    // One of them moves away.
    story.heard(&["a"], &[6], 310);
    assert_eq!(story.0.expire(at(400)), [change(5)]);
    assert_eq!(story.of(5), ["b"]);
}

#[test]
fn what_the_agent_resolved_holds_everywhere_and_comes_first() {
    let mut story = story();
    story.heard(&["alias"], &[5], 0);
    let own: Arc<str> = "db".into();
    let everywhere = Change {
        place: (EVERYWHERE, bytes(addr(5))),
        new_owner: false,
    };
    assert_eq!(story.0.resolved(&own, &[addr(5)], at(1)), [everywhere]);
    assert_eq!(story.of(5), ["db", "alias"]);
    let names = story.0.of(99, &bytes(addr(5)));
    assert_eq!(
        names,
        [KnownName {
            name: own.clone(),
            own: true
        }]
    );
    assert_eq!(story.0.own(), [(addr(5), names)]);
    assert_eq!(story.0.resolved(&own, &[], at(2)), []);
    assert_eq!(story.0.keep_own(&[own]), []);
    assert_eq!(story.0.keep_own(&[]), [everywhere]);
    assert_eq!(story.of(5), ["alias"]);
}

#[test]
fn a_flood_of_names_pushes_out_the_oldest_of_its_namespace_alone() {
    let mut names = HostNames::default();
    let other = answer(&["quiet"], &[1], 60);
    names.heard(1, &other, at(0));
    let own: Arc<str> = "own".into();
    names.resolved(&own, &[addr(2)], at(0));
    for n in 0..20_000_u32 {
        let mut flood = answer(&[&format!("x{n}.example")], &[], 60);
        flood.addresses = vec![IpAddr::from(n.to_be_bytes())];
        names.heard(2, &flood, at(u64::from(n)));
        assert!(names.counts[&2] <= MOST_PER_NAMESPACE);
    }
    assert!(names.len() <= MOST);
    assert!(names.answered.len() <= names.len());
    assert_eq!(names.of(1, &bytes(addr(1)))[0].name, "quiet".into());
    assert_eq!(names.of(1, &bytes(addr(2)))[0].name, own);
    // The last ones are there.
    let last = IpAddr::from(19_999_u32.to_be_bytes());
    assert_eq!(&*names.of(2, &bytes(last))[0].name, "x19999.example");
}

#[test]
fn an_address_with_many_names_weighs_as_much() {
    let mut names = HostNames::default();
    for n in 0..2_000_u32 {
        let all: Vec<String> = (0..MOST_NAMES)
            .map(|i| format!("n{i}-{n}.example"))
            .collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let mut flood = answer(&all, &[], 60);
        flood.addresses = vec![IpAddr::from(n.to_be_bytes())];
        // As many namespaces as it takes.
        names.heard(1 + u64::from(n % 10), &flood, at(u64::from(n)));
        assert!(names.len() <= MOST, "{}", names.len());
    }
    assert!(names.len() > MOST / 2);
}

#[test]
fn an_address_has_so_many_names_and_no_more() {
    let mut story = story();
    for n in 0..100 {
        story.heard(&[&format!("n{n}")], &[5], n);
    }
    let names = story.of(5);
    assert_eq!(names.len(), MOST_NAMES);
    assert!(names.contains(&"n99".to_owned()), "{names:?}");
}

#[derive(Clone, Debug)]
enum Op {
    Heard(u64, Vec<u8>, Vec<u8>, u64),
    Resolved(u8, Vec<u8>),
    Keep(u8),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let few = || prop::collection::vec(0..5u8, 1..4);
    prop_oneof![
        6 => (1..3u64, few(), few(), 0..200u64).prop_map(|(n, a, b, t)| Op::Heard(n, a, b, t)),
        2 => (0..5u8, prop::collection::vec(0..5u8, 0..4)).prop_map(|(n, a)| Op::Resolved(n, a)),
        1 => (0..5u8).prop_map(Op::Keep),
        4 => (0..200u64).prop_map(Op::Wait),
    ]
}

proptest! {
    /// Whoever follows the changes knows all names at any time; and what was heard just now is known.
    #[test]
    fn changes_tell_everything(ops in prop::collection::vec(op(), 1..60)) {
        let mut names = HostNames::default();
        let mut followed: HashMap<Place, Vec<KnownName>> = HashMap::new();
        let mut now = at(0);
        for op in ops {
            let text = |n: &u8| format!("n{n}");
            let mut changes = match &op {
                Op::Heard(netns, aliases, addresses, ttl) => {
                    let aliases: Vec<String> = aliases.iter().map(text).collect();
                    let aliases: Vec<&str> = aliases.iter().map(String::as_str).collect();
                    let said = answer(&aliases, addresses, *ttl);
                    let changes = names.heard(*netns, &said, now);
                    for last in addresses {
                        let known = names.of(*netns, &bytes(addr(*last)));
                        for alias in &aliases {
                            prop_assert!(known.iter().any(|known| &*known.name == *alias));
                        }
                    }
                    changes
                }
                Op::Resolved(name, addresses) => {
                    let addresses: Vec<IpAddr> = addresses.iter().map(|last| addr(*last)).collect();
                    names.resolved(&text(name).into(), &addresses, now)
                }
                Op::Keep(name) => names.keep_own(&[text(name).into()]),
                Op::Wait(secs) => {
                    now = now + Nanos::from_secs(*secs);
                    Vec::new()
                }
            };
            changes.extend(names.expire(now));
            for change in changes {
                let places = match change.place {
                    (EVERYWHERE, addr) => [(1, addr), (2, addr)].to_vec(),
                    place => vec![place],
                };
                for place in places {
                    followed.insert(place, names.of(place.0, &place.1));
                }
            }
            let counted = names.count;
            let counts = names.counts.clone();
            names.tidy();
            prop_assert_eq!((counted, &counts), (names.count, &names.counts));
            for netns in 1..3 {
                for last in 0..5 {
                    let known = names.of(netns, &bytes(addr(last)));
                    prop_assert!(known.len() <= 2 * MOST_NAMES);
                    let told = followed.get(&(netns, bytes(addr(last)))).cloned();
                    prop_assert_eq!(known, told.unwrap_or_default());
                }
            }
        }
    }
}
