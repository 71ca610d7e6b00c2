#!/bin/sh
# The guest's first process. Three serial lines: ttyS0 the kernel's console, ttyS1 what the check
# prints, ttyS2 its exit code.
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/ TERM=dumb
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
while read -r module; do
    insmod "/lib/modules/$module" || echo "init: module $module was not loaded"
done </lib/modules/order
ip link set lo up
hostname guest
stty -F /dev/ttyS1 raw -echo
stty -F /dev/ttyS2 raw -echo
cd /
sh /payload/run </dev/null >/dev/ttyS1 2>&1
echo $? >/dev/ttyS2
sync
poweroff -f
