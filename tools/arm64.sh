#!/usr/bin/env bash
# Run the first tier of tests on an emulated ARM64 processor: tools/arm64.sh FOLDER [arguments of pytest]
#
# FOLDER becomes the root of a Debian system for arm64, whose programs QEMU's user mode runs. Needs root on Debian with
# the packages debootstrap, qemu-user-static and binfmt-support. A second call uses the same folder again. The emulator
# shows the host's /proc/cpuinfo, so a file with the features of an ARM Neoverse N1 is mounted over it. QEMU's default
# processor has matrix instructions for which OpenBLAS 0.3.31 (in NumPy 2.4) computes wrong float32 products x @ x.T.
# In the emulator limits of address space have no effect (tests of memory fail), the start time that a process reads of
# itself differs by a tick from what others read (tests of locks without the system's fail), and grammars are not compiled
# within the second that they may take (tests of guided text fail). The tier takes 100 minutes on two cores of a Zen 3.
set -euo pipefail
root=$(realpath -m "$1")
shift
here=$(cd "$(dirname "$0")/.." && pwd)
packages=python3-venv,python3-dev,git,gcc,libc6-dev,ca-certificates

[ -e "$root/usr/bin/python3" ] || debootstrap --arch=arm64 --variant=minbase --include="$packages" bookworm "$root"
for file in /etc/resolv.conf /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
    if [ -e "$file" ]; then cp "$file" "$root$file"; fi
done
rm -rf "$root/tricycle"
mkdir -p "$root/tricycle"
git -C "$here" archive HEAD | tar -x -C "$root/tricycle"

cleanup() { umount --quiet "$root/proc/cpuinfo" "$root/proc" "$root/sys" "$root/dev" || true; }
trap cleanup EXIT
mount -t proc proc "$root/proc"
mount -t sysfs sys "$root/sys"
mount --bind /dev "$root/dev"
for processor in $(seq 0 $(($(nproc) - 1))); do
    printf 'processor\t: %s\nFeatures\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp asimdrdm lrcpc asimddp\n' "$processor"
    printf 'CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\n'
done > "$root/tmp/cpuinfo"
mount --bind "$root/tmp/cpuinfo" "$root/proc/cpuinfo"

QEMU_CPU=neoverse-n1 HOME=/root LC_ALL=C.UTF-8 chroot "$root" bash -euo pipefail -c '
    cd /tricycle
    [ -d /environment ] || python3 -m venv /environment
    . /environment/bin/activate
    pip install --quiet -e ".[test]"
    time pytest -n auto -p no:cacheprovider "$@"
' tier "$@"
