mod bad;
mod changes;
mod documentation;
mod explaining;
mod files;
mod properties;
mod resolution;
mod spelling;
mod writing;

use super::KnownName;

/// A name that is known for an address.
fn known(name: &str, own: bool) -> KnownName {
    KnownName {
        name: name.into(),
        own,
    }
}
