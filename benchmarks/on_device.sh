#!/usr/bin/env bash
# Runs jobs on a bare GPU machine that has torch and triton, and no network.
#
# Here:    benchmarks/on_device.sh pack PACK TREE[=REVISION] ...
#   fills the folder PACK/code with an archive of each git worktree TREE (REVISION, default HEAD; models/, docs/
#   and benchmarks/results/ stay behind). The lead puts beside it: PACK/site.tar.zst (Python packages),
#   PACK/fa3.tar.zst (FlashAttention-3), PACK/zstd/ (the program zstd and its libraries), and the scripts of
#   jobs in PACK/queue/.
# There:   bash PACK/on_device.sh run PACK OUT [SECONDS@]TREE:SCRIPT ...
#   unpacks all that once, to /tmp/pack. Then it runs each PACK/queue/SCRIPT in turn, at the root of the TREE (its
#   last name; "." is the folder in which this script was started), for at most SECONDS (100). OUT/TREE.SCRIPT.out is what the job prints; a job writes its files to $OUT.
#   OUT/triton.tar.zst.* is what triton compiled and tuned; as PACK/triton.tar.zst.* it spares the next machine that.
set -u

pack() {
  local folder=$1 tree name revision
  shift
  mkdir -p "$folder/code" "$folder/queue"
  cp "$0" "$folder/on_device.sh"
  for tree in "$@"; do
    revision=HEAD
    case $tree in *=*) revision=${tree#*=} tree=${tree%%=*} ;; esac
    name=$(basename "$tree")
    git -C "$tree" archive "$revision" -- . ':!models' ':!docs' ':!benchmarks/results' |
      zstd -q -f -12 -o "$folder/code/$name.tar.zst"
  done
  du -ch "$folder"/* | tail -20
}

unzstd_here() {
  LD_LIBRARY_PATH=$1/zstd "$1/zstd/zstd" -qdc --long=27 "$2"
}

prepare() {
  local folder=$1 archive name
  chmod +x "$folder/zstd/zstd"
  if [ ! -e /tmp/pack/ready ]; then
    mkdir -p /tmp/pack/site /tmp/pack/triton
    unzstd_here "$folder" "$folder/fa3.tar.zst" | tar -xf - -C /tmp/pack/site &
    unzstd_here "$folder" "$folder/site.tar.zst" | tar -xf - -C /tmp/pack/site
    cat "$folder"/triton.tar.zst.* 2>/dev/null | unzstd_here "$folder" - | tar -xf - -C /tmp/pack/triton
    wait
    touch /tmp/pack/ready
  fi
  for archive in "$folder"/code/*.tar.zst; do
    name=$(basename "$archive" .tar.zst)
    rm -rf "/tmp/pack/code/$name"
    mkdir -p "/tmp/pack/code/$name"
    unzstd_here "$folder" "$archive" | tar -xf - -C "/tmp/pack/code/$name"
  done
}

run() {
  local folder=$1 out=$2 job limit tree script started
  folder=$(realpath "$folder")
  mkdir -p "$out"
  out=$(realpath "$out")
  shift 2
  started=$SECONDS
  prepare "$folder"
  echo "prepared in $((SECONDS - started)) s"
  export TRITON_CACHE_DIR=/tmp/pack/triton TRITON_CACHE_AUTOTUNING=1 PYTHONUNBUFFERED=1
  export OUT=$out
  for job in "$@"; do
    limit=100
    case $job in *@*) limit=${job%%@*} job=${job#*@} ;; esac
    tree=${job%%:*} script=${job#*:}
    started=$SECONDS
    (
      [ "$tree" = . ] || cd "/tmp/pack/code/$tree" || exit 1
      export PYTHONPATH=/tmp/pack/site:$PWD/stubs
      exec timeout -k 5 "$limit" bash "$folder/queue/$script"
    ) >"$out/${tree/#./here}.$script.out" 2>&1
    echo "$job: exit status $?, $((SECONDS - started)) s"
  done
  find /tmp/pack/triton -type f \( -name '*.ttir' -o -name '*.ttgir' -o -name '*.llir' -o -name '*.ptx' \
    -o -name '*.source' \) -delete
  tar -cf - -C /tmp/pack/triton . | LD_LIBRARY_PATH=$folder/zstd "$folder/zstd/zstd" -q -12 -T8 |
    split -b 15M - "$out/triton.tar.zst."
  ls -l "$out"
}

"$@"
