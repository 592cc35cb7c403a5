#!/bin/sh
# fetch-kafka.sh - the jars of a Kafka broker, which the tests start.
#
#     scripts/fetch-kafka.sh [DIR]             default: build/kafka
#
# Installed by name and version with Maven: 45 jars, 43 MB, half a minute the
# first time. Does nothing when DIR has them already; DIR/.complete says so.
set -eu

version=4.1.0
dir=${1:-build/kafka}

if [ "$(cat "$dir/.complete" 2>/dev/null)" = $version ]; then
    exit 0
fi
if ! command -v mvn >/dev/null; then
    echo "fetch-kafka: mvn is not installed" >&2
    exit 1
fi
mkdir -p "$dir"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/pom.xml" <<POM
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>nightshift.test</groupId>
  <artifactId>kafka-broker</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>$version</version>
    </dependency>
  </dependencies>
  <build><plugins><plugin>
    <groupId>org.apache.maven.plugins</groupId>
    <artifactId>maven-dependency-plugin</artifactId>
    <version>3.6.1</version>
  </plugin></plugins></build>
</project>
POM
rm -f "$dir"/*.jar
mvn -q -B -f "$work/pom.xml" dependency:copy-dependencies \
    "-DoutputDirectory=$(cd "$dir" && pwd)" </dev/null
echo $version >"$dir/.complete"
