// Programs whose retries are known: truth WORKERS HOST PORT SECONDS RATE RETRIES, as truth.py.
package main

import (
	"fmt"
	"io"
	"math/rand"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

var calls, retries int64

func ask(client *http.Client, url string) bool {
	answer, err := client.Get(url)
	if err != nil {
		return false
	}
	defer answer.Body.Close()
	io.Copy(io.Discard, answer.Body)
	return answer.StatusCode < 500
}

func number(word string) float64 {
	value, err := strconv.ParseFloat(word, 64)
	if err != nil {
		panic(err)
	}
	return value
}

func main() {
	workers := int(number(os.Args[1]))
	host, port := os.Args[2], os.Args[3]
	end := time.Now().Add(time.Duration(number(os.Args[4]) * float64(time.Second)))
	rate, most := number(os.Args[5]), int(number(os.Args[6]))
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	var all sync.WaitGroup
	for worker := 0; worker < workers; worker++ {
		all.Add(1)
		go func() {
			defer all.Done()
			for time.Now().Before(end) {
				url := fmt.Sprintf("http://%s:%s/go/%d", host, port, atomic.AddInt64(&calls, 1))
				for attempt := 0; attempt <= most; attempt++ {
					if attempt > 0 {
						atomic.AddInt64(&retries, 1)
					}
					if ask(client, url) {
						break
					}
				}
				pause := rand.ExpFloat64() * float64(workers) / rate
				time.Sleep(time.Duration(pause * float64(time.Second)))
			}
		}()
	}
	all.Wait()
	fmt.Printf("{\"calls\":%d,\"retries\":%d}\n", calls, retries)
}
